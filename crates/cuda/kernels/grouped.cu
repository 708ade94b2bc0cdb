// Grouped matmuls of experts in bf16 or f16 on Hopper: wgmma on tiles of 128 × 256, tiles handed out by row counts that are on the device. One
// warp group loads, two multiply. Rows are gathered as they are loaded and scattered as they are stored; of WEIGHT's
// two factors x is sorted in memory before, since threads alone cannot load as much as the tensor cores take, and two blocks
// of a cluster, whose tiles lie below each other, load half of it each for both.
//
// FORWARD: y[r, c] = Σ x[r / sharers, d] · w[e, c, d]. INPUT: dx[r, c] = Σ dy[r, d] · w[e, d, c]. WEIGHT: dw[e, i, j] = Σ dy[r, i] ·
// x[at, j], where r is at place `at` of the order. Columns and depth are multiples of 64.

struct alignas(64) TensorMap {
    u64 words[16];
};

struct TensorMaps {
    TensorMap from, to;
};

enum Kind { FORWARD, INPUT, WEIGHT };

// As in `ops/grouped.rs`.
const int MOST_EXPERTS = 256;
const int BM = 128, BN = 256, BK = 64, STAGES = 4;
// Threads that load: 16 bytes of a line each, eight of them a block of 64 columns.
const int LOADERS = 128, LINES = LOADERS / 8;

// Elements as bits.
struct Shared {
    u16 a[STAGES][BM * BK];
    u16 b[STAGES][BN * BK];
    u16 out[2][2][64 * 64];
    u64 full[STAGES], empty[STAGES];
    int starts[2 * MOST_EXPERTS + 1];
    u8 largest[MOST_EXPERTS];
};
static_assert(sizeof(Shared) == 231752, "as in ops/grouped.rs");

struct Args {
    const u16 *a;      // FORWARD: x; INPUT, WEIGHT: dy
    void *out;         // [rows, columns]; WEIGHT: sums [experts, lines, columns]
    const int *order;  // rows by expert, -1 where there is none
    const int *starts; // where those of each expert start, the end of all; how many each has; experts, the largest first
    int experts, columns;
    int depth; // FORWARD, INPUT
    int lines; // WEIGHT
    int sharers, kind, add;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DEV static __device__ __forceinline__

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void barrier_expect(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// Of the same barrier in a block of the cluster.
DEV void barrier_arrive_at(u32 b, u32 block) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(b),
                 "r"(block)
                 : "memory");
}
DEV void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV void barrier_wait(u32 b, u32 parity) {
    asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(b),
                 "r"(parity)
                 : "memory");
}
DEV void load_box(u32 to, const TensorMap *map, int x, int y, u32 b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(b)
                 : "memory");
}
// The same for both blocks of a cluster: their memory, and their barriers.
DEV void load_box_for_both(u32 to, const TensorMap *map, int x, int y, u32 b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
                 "[%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(b), "h"((u16)3)
                 : "memory");
}
// 16 bytes, or zeros.
DEV void load_pack(u32 to, const u16 *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Tells the barrier when all that this thread has asked for so far is there.
DEV void loads_arrive(u32 b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
}
// Of a tile with swizzled rows of 128 bytes.
DEV u64 describe(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)1 << 62);
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEV void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
DEV void group_barrier(int which) { asm volatile("bar.sync %0, 128;" ::"r"(1 + which) : "memory"); }

#define R8(a, i)                                                                                                       \
    "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), "+f"(a[i + 6]),        \
        "+f"(a[i + 7])
#define R128                                                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
    "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
    "%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"   \
    "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"   \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// d (+)= a · b of 64 × 16 and 16 × 256 elements of type T, either of them transposed.
template <typename T>
struct Wgmma;
#define WGMMA(T)                                                                                                       \
    template <>                                                                                                        \
    struct Wgmma<T> {                                                                                                  \
        template <int TA, int TB>                                                                                      \
        DEV void multiply(float (&d)[128], u64 a, u64 b, int add) {                                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n256k16.f32." #T "." #T " {" R128                            \
                         "}, %128, %129, p, 1, 1, %131, %132;\n}"                                                      \
                         : R8(d, 0), R8(d, 8), R8(d, 16), R8(d, 24), R8(d, 32), R8(d, 40), R8(d, 48), R8(d, 56),       \
                           R8(d, 64), R8(d, 72), R8(d, 80), R8(d, 88), R8(d, 96), R8(d, 104), R8(d, 112), R8(d, 120)   \
                         : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));                                                \
        }                                                                                                              \
    };
WGMMA(bf16)
WGMMA(f16)

struct Tile {
    int expert, row, column, depth;
};

// A block's tile of a round, if there is one. `row` counts in the order of rows, or for WEIGHT in the expert's lines.
template <int KIND>
DEV bool tile_of(const Args &g, const Shared &s, i64 round, Tile &t) {
    const int *starts = s.starts;
    int across = (g.columns + BN - 1) / BN;
    i64 i = round * gridDim.x + blockIdx.x;
    if (KIND == WEIGHT) {
        // The longest sums come first, and clusters take turns in who gets the longer ones.
        int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
        i = round * clusters + (round & 1 ? clusters - 1 - cluster : cluster);
        int down = (g.lines + 2 * BM - 1) / (2 * BM), per = down * across;
        if (i >= (i64)per * g.experts) return false;
        int at = (int)(i % per);
        t.expert = s.largest[i / per];
        t.row = (at % down * 2 + blockIdx.x % 2) * BM;
        t.column = at / down * BN;
        t.depth = (starts[g.experts + 1 + t.expert] + BK - 1) / BK;
        return true;
    }
    // Sixteen tiles of rows share columns of the weights while those are in the cache.
    const int BAND = 16;
    int rows = starts[g.experts] / BM;
    if (i >= (i64)rows * across) return false;
    int per = BAND * across, first = (int)(i / per) * BAND, band = min(BAND, rows - first), at = (int)(i % per);
    t.row = (first + at % band) * BM;
    t.column = at / band * BN;
    t.depth = g.depth / BK;
    int low = 0, high = g.experts;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (starts[middle] <= t.row) low = middle;
        else high = middle;
    }
    t.expert = low;
    return true;
}

// Loads tiles, as many stages ahead of those who multiply as there are.
template <int KIND>
DEV void load_tiles(const TensorMap *map, const Args &g, Shared &s) {
    int tid = threadIdx.x, line = tid / 8, chunk = tid % 8;
    int stage = 0, phase = 0;
    // Lines that lie a multiple of eight apart are swizzled alike.
    u32 to = line * 128 + ((chunk ^ (line & 7)) * 16);
    Tile t;
    for (i64 round = 0; tile_of<KIND>(g, s, round, t); round++) {
        const int *order = g.order + (KIND == WEIGHT ? s.starts[t.expert] : t.row) + line;
        const u16 *from[BM / LINES];
        int rows[BK / LINES];
        u32 there = 0;
        if (KIND != WEIGHT) {
#pragma unroll
            for (int j = 0; j < BM / LINES; j++) {
                int row = order[j * LINES];
                there |= (u32)(row >= 0) << j;
                from[j] = g.a + (i64)(max(row, 0) / g.sharers) * g.depth + chunk * 8;
            }
        } else {
#pragma unroll
            for (int j = 0; j < BK / LINES; j++) rows[j] = t.depth ? order[j * LINES] : -1;
            // Which halves of the lines there are.
            there = (g.lines > t.row) + 2 * (g.lines - t.row >= BM);
        }
        for (int d = 0; d < t.depth; d++) {
            u32 full = shared_address(&s.full[stage]);
            barrier_wait(shared_address(&s.empty[stage]), phase ^ 1);
            u32 a = shared_address(s.a[stage]) + to, b = shared_address(s.b[stage]);
            if (tid == 0) {
                barrier_expect(full, BN * BK * 2);
                // Rows of the map: those of weights, or of x in the order of rows.
                int row = KIND == FORWARD ? t.expert * g.columns + t.column
                                          : (KIND == INPUT ? t.expert * g.depth : s.starts[t.expert]) + d * BK;
                if (KIND == FORWARD) load_box(b, map, d * BK, row, full);
                else if (KIND == INPUT)
                    for (int c = 0; c < 4; c++) load_box(b + c * 8192, map, t.column + c * 64, row, full);
                else
                    for (int c = blockIdx.x % 2 * 2, i = 0; i < 2; c++, i++)
                        load_box_for_both(b + c * 8192, map, t.column + c * 64, row, full);
            }
            if (KIND != WEIGHT) {
#pragma unroll
                for (int j = 0; j < BM / LINES; j++) {
                    load_pack(a + j * LINES * 128, from[j], there >> j & 1);
                    from[j] += BK;
                }
            } else {
#pragma unroll
                for (int j = 0; j < BK / LINES; j++) {
                    bool row = rows[j] >= 0;
                    const u16 *dy = g.a + (i64)max(rows[j], 0) * g.lines + t.row + chunk * 8;
                    // Where the next rows are is known by the time they are needed.
                    if (d + 1 < t.depth) rows[j] = order[(d + 1) * BK + j * LINES];
                    load_pack(a + j * LINES * 128, dy, row && there);
                    load_pack(a + 8192 + j * LINES * 128, dy + 64, row && there > 1);
                }
            }
            loads_arrive(full);
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Rows of 64 columns at a time through shared memory, 16-byte chunks swizzled, to where they belong.
template <typename T>
DEV void store_rows(const Args &g, Shared &s, const Tile &t, int half, const int (&to)[4], const float (&acc)[128]) {
    int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    u32 room = shared_address(s.out[half][0]);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        group_barrier(half);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 v[4];
#pragma unroll
            for (int h = 0; h < 4; h++) {
                int at = (q * 8 + j + h / 2) * 4 + h % 2 * 2;
                v[h] = Of<T>::two(acc[at], acc[at + 1]);
            }
            // Rows 0 to 7 and 8 to 15 of column block j, then of j + 1.
            int m = lane / 8, r = warp * 16 + (m & 1) * 8 + lane % 8, c = j + m / 2;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(room + r * 128 + ((c ^ (r & 7)) * 16)),
                         "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
        }
        group_barrier(half);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = j * 16 + tid / 8, c = tid % 8, column = t.column + q * 64 + c * 8;
            Pack<T> v = *(const Pack<T> *)((const u8 *)s.out[half][0] + r * 128 + ((c ^ (r & 7)) * 16));
            if (to[j] >= 0 && column < g.columns) *(Pack<T> *)((T *)g.out + (i64)to[j] * g.columns + column) = v;
        }
    }
}

// 32 columns at a time: 64 lines of 128 bytes, swizzled as the tensor map says; stored, or added to what is there.
DEV void store_sums(const TensorMap *map, const Args &g, Shared &s, const Tile &t, int half, const float (&acc)[128]) {
    int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, r = warp * 16 + lane / 4;
    int first = t.row + half * 64;
    if (g.kind == SUM_BF16) {
        if (first >= g.lines) return;
#pragma unroll
        for (int j = 0; j < 32; j++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int column = t.column + j * 8 + lane % 4 * 2, at = j * 4 + h * 2;
                if (column >= g.columns) continue;
                u32 *place = (u32 *)((bf16 *)g.out + ((i64)t.expert * g.lines + first + r + h * 8) * g.columns + column);
                u32 old = g.add ? *place : 0;
                float x = acc[at] + __uint_as_float(old << 16), y = acc[at + 1] + __uint_as_float(old & 0xffff0000u);
                *place = Of<bf16>::two(x, y);
            }
        }
        return;
    }
#pragma unroll
    for (int q = 0; q < 8; q++) {
        u8 *room = (u8 *)s.out[half][q & 1];
        if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        group_barrier(half);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int line = r + h * 8, c = j * 2 + lane % 4 / 2, at = (q * 4 + j) * 4 + h * 2;
                *(float2 *)(room + line * 128 + ((c ^ (line & 7)) * 16) + lane % 2 * 8) = make_float2(acc[at], acc[at + 1]);
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_barrier(half);
        if (tid == 0) {
            int x = t.column + q * 32;
            u32 from = shared_address(room);
            if (x < g.columns && first < g.lines) {
                if (g.add)
                    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                                 "r"(x), "r"(first), "r"(t.expert), "r"(from)
                                 : "memory");
                else
                    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
                                 "r"(first), "r"(t.expert), "r"(from)
                                 : "memory");
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

// What an expert without rows has.
DEV void store_zeros(const Args &g, const Tile &t, int half) {
    for (int i = threadIdx.x % 128; i < 64 * BN; i += 128) {
        int line = t.row + half * 64 + i / BN, column = t.column + i % BN;
        if (line >= g.lines || column >= g.columns) continue;
        sum_write(g.out, g.kind, ((i64)t.expert * g.lines + line) * g.columns + column, 0.0f, 0);
    }
}

// Says that a stage may be loaded again: to those who load it, of both blocks where they load for each other.
template <int KIND>
DEV void release(Shared &s, int stage, int tid) {
    u32 empty = shared_address(&s.empty[stage]);
    if (KIND == WEIGHT && tid < 2) barrier_arrive_at(empty, tid);
    if (KIND != WEIGHT && tid == 0) barrier_arrive(empty);
}

template <typename T, int KIND>
DEV void multiply_tiles(const TensorMap *map, const Args &g, Shared &s) {
    const int TA = KIND == WEIGHT, TB = KIND != FORWARD;
    int half = (threadIdx.x - LOADERS) / 128, tid = threadIdx.x % 128;
    int stage = 0, phase = 0;
    Tile t;
    for (i64 round = 0; tile_of<KIND>(g, s, round, t); round++) {
        float acc[128];
        int to[4];
        if (KIND != WEIGHT) {
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = g.order[t.row + half * 64 + j * 16 + tid / 8];
        }
        if (t.depth == 0) {
            if (!g.add) store_zeros(g, t, half);
            continue;
        }
        int before = -1;
        for (int d = 0; d < t.depth; d++) {
            barrier_wait(shared_address(&s.full[stage]), phase);
            // What threads have copied is there for the tensor cores too.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            u32 a = shared_address(s.a[stage]) + half * 8192, b = shared_address(s.b[stage]);
            wgmma_fence();
#pragma unroll
            for (int q = 0; q < 4; q++) {
                u64 left = TA ? describe(a + q * 2048, 8192, 1024) : describe(a + q * 32, 16, 1024);
                u64 right = TB ? describe(b + q * 2048, 8192, 1024) : describe(b + q * 32, 16, 1024);
                Wgmma<T>::template multiply<TA, TB>(acc, left, right, d > 0 || q > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (before >= 0) release<KIND>(s, before, tid);
            before = stage;
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait<0>();
        if (before >= 0) release<KIND>(s, before, tid);
        if (KIND == WEIGHT) store_sums(map, g, s, t, half, acc);
        else store_rows<T>(g, s, t, half, to, acc);
    }
    if (KIND == WEIGHT && tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <typename T, int KIND>
DEV void grouped(const TensorMap *from, const TensorMap *to, const Args &g) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared &s = *(Shared *)raw;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s.full[i]), LOADERS + 1);
            barrier_init(shared_address(&s.empty[i]), KIND == WEIGHT ? 4 : 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = threadIdx.x; i <= 2 * g.experts; i += blockDim.x) s.starts[i] = g.starts[i];
    for (int i = threadIdx.x; i < g.experts; i += blockDim.x) s.largest[i] = (u8)g.starts[2 * g.experts + 1 + i];
    if (KIND == WEIGHT) cluster_barrier();
    else __syncthreads();
    if (threadIdx.x < LOADERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        load_tiles<KIND>(from, g, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        multiply_tiles<T, KIND>(to, g, s);
    }
    // Neither block ends while the other one writes to its memory.
    if (KIND == WEIGHT) cluster_barrier();
}

// WEIGHT has two maps: of x in the order of rows, and of sums in f32.
#define GROUPED(T, NAME, KIND, CLUSTER)                                                                                \
    extern "C" __global__ void CLUSTER __launch_bounds__(384, 1)                                                       \
        grouped_##NAME##_##T(const __grid_constant__ TensorMaps maps, const u16 *a, void *out, const int *order,       \
                             const int *starts, int experts, int columns, int depth, int lines, int sharers, int kind, \
                             int add) {                                                                                \
        Args g = {a, out, order, starts, experts, columns, depth, lines, sharers, kind, add};                          \
        grouped<T, KIND>(&maps.from, &maps.to, g);                                                                     \
    }
#define GROUPED_OF(T)                                                                                                  \
    GROUPED(T, forward, FORWARD, )                                                                                     \
    GROUPED(T, input, INPUT, )                                                                                         \
    GROUPED(T, weight, WEIGHT, __cluster_dims__(2, 1, 1))
GROUPED_OF(bf16)
GROUPED_OF(f16)
#endif
