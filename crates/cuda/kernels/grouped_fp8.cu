// Grouped matmuls of experts in fp8 on Hopper. FORWARD is that of `grouped.cuh`, of bytes; the input gradient is one, of transposed weights. For sums over
// rows both factors lie transposed in memory, in the order of experts, so the copy engine loads all; sums of 128 products leave the tensor
// cores, which keep 14 bits of them, and are added in f32.

// Bytes of the formats, and the formats of two factors.
struct e4m3 {};
struct e5m2 {};
template <typename A, typename B>
struct Bytes {};

// Steps of a sum that are loaded ahead: tiles of 128 × 128.
const int SIDE = 128, STEPS = 6;

struct SharedWeight {
    u8 a[STEPS][BM * SIDE];
    u8 b[STEPS][SIDE * SIDE];
    u16 out[2][2][64 * 64];
    u64 full[STEPS], empty[STEPS];
    int starts[2 * MOST_EXPERTS + 1];
    u8 largest[MOST_EXPERTS];
};
static_assert(sizeof(SharedWeight) == 231784, "as in ops/grouped.rs");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define R64                                                                                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
    "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
    "%59,%60,%61,%62,%63"
// d (+)= a · b of 64 × 32 bytes and 32 × 256 or 128.
#define WGMMA_BYTES(A, B)                                                                                              \
    template <>                                                                                                        \
    struct Wgmma<Bytes<A, B>> {                                                                                        \
        static const int BYTES = 1;                                                                                    \
        template <int TA, int TB>                                                                                      \
        DEV void multiply(float (&d)[128], u64 a, u64 b, int add) {                                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n256k32.f32." #A "." #B " {" R128 "}, %128, %129, p, 1, 1;\n}" \
                         : R8(d, 0), R8(d, 8), R8(d, 16), R8(d, 24), R8(d, 32), R8(d, 40), R8(d, 48), R8(d, 56),       \
                           R8(d, 64), R8(d, 72), R8(d, 80), R8(d, 88), R8(d, 96), R8(d, 104), R8(d, 112), R8(d, 120)   \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
        DEV void multiply(float (&d)[64], u64 a, u64 b, int add) {                                                     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                  \
                         "wgmma.mma_async.sync.aligned.m64n128k32.f32." #A "." #B " {" R64 "}, %64, %65, p, 1, 1;\n}"  \
                         : R8(d, 0), R8(d, 8), R8(d, 16), R8(d, 24), R8(d, 32), R8(d, 40), R8(d, 48), R8(d, 56)        \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };
WGMMA_BYTES(e4m3, e4m3)
WGMMA_BYTES(e5m2, e4m3)

// dyᵀ for this block; of xᵀ a half for both blocks of the cluster.
DEV void load_sums(const TensorMap *dy, const TensorMap *x, const Args &g, SharedWeight &s) {
    int stage = 0, phase = 0, half = blockIdx.x % 2 * (SIDE / 2);
    Tile t;
    for (i64 round = 0; tile_of_weights<SIDE, SIDE>(g, s, round, t); round++) {
        for (int d = 0; d < t.depth; d++) {
            u32 full = shared_address(&s.full[stage]);
            int at = s.starts[t.expert] + d * SIDE;
            barrier_wait(shared_address(&s.empty[stage]), phase ^ 1);
            barrier_expect(full, 2 * SIDE * SIDE);
            load_box(shared_address(s.a[stage]), dy, at, t.row, full);
            load_box_for_both(shared_address(s.b[stage]) + half * SIDE, x, at, t.column + half, full);
            if (++stage == STEPS) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

template <typename E>
DEV void add_up(const TensorMap *map, const Args &g, SharedWeight &s) {
    int half = (threadIdx.x - LOADERS) / 128, tid = threadIdx.x % 128;
    int stage = 0, phase = 0;
    Tile t;
    for (i64 round = 0; tile_of_weights<SIDE, SIDE>(g, s, round, t); round++) {
        if (t.depth == 0) {
            if (!g.add) store_zeros<SIDE>(g, t, half);
            continue;
        }
        float sums[64] = {};
        for (int d = 0; d < t.depth; d++) {
            float acc[64];
            barrier_wait(shared_address(&s.full[stage]), phase);
            u32 a = shared_address(s.a[stage]) + half * 8192, b = shared_address(s.b[stage]);
            wgmma_fence();
#pragma unroll
            for (int q = 0; q < 4; q++)
                Wgmma<E>::multiply(acc, describe(a + q * 32, 16, 1024), describe(b + q * 32, 16, 1024), q > 0);
            wgmma_commit();
            wgmma_wait<0>();
            if (tid < 2) barrier_arrive_at(shared_address(&s.empty[stage]), tid);
#pragma unroll
            for (int i = 0; i < 64; i++) sums[i] += acc[i];
            if (++stage == STEPS) {
                stage = 0;
                phase ^= 1;
            }
        }
        float by = *g.unit * *g.units;
#pragma unroll
        for (int i = 0; i < 64; i++) sums[i] *= by;
        store_sums(map, g, s, t, half, sums);
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct WeightMaps {
    TensorMap dy, x, to;
};

template <typename E>
DEV void grouped_weight(const WeightMaps &maps, const Args &g) {
    extern __shared__ __align__(1024) u8 raw[];
    SharedWeight &s = *(SharedWeight *)raw;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STEPS; i++) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    load_starts(g, s);
    cluster_barrier();
    if (threadIdx.x < LOADERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 0) load_sums(&maps.dy, &maps.x, g, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        add_up<E>(&maps.to, g, s);
    }
    // Neither block ends while the other one writes to its memory.
    __syncwarp();
    cluster_barrier();
}

#define FORWARD_OF(A)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                               \
        grouped_forward_##A(const __grid_constant__ TensorMaps maps, const u8 *a, void *out, const int *order,         \
                            const int *starts, int experts, int columns, int depth, int sharers, const float *unit,    \
                            const float *units) {                                                                      \
        Args g = {a, out, order, starts, experts, columns, depth, 0, sharers, 0, 0, unit, units};                      \
        grouped<Bytes<A, e4m3>, bf16, FORWARD>(&maps.from, &maps.to, g);                                               \
    }
FORWARD_OF(e4m3)
FORWARD_OF(e5m2)

#define WEIGHT_OF(A)                                                                                                   \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                                     \
        grouped_weight_##A(const __grid_constant__ WeightMaps maps, void *out, const int *starts, int experts,         \
                           int columns, int lines, int kind, int add, const float *unit, const float *units) {         \
        Args g = {0, out, 0, starts, experts, columns, 0, lines, 1, kind, add, unit, units};                           \
        grouped_weight<Bytes<A, e4m3>>(maps, g);                                                                       \
    }
WEIGHT_OF(e4m3)
WEIGHT_OF(e5m2)
#endif
