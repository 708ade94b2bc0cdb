// Grouped matmuls of experts in bf16 or f16 on Hopper: wgmma on tiles of 128 × 256, tiles handed out by row counts that are on the device. One
// warp group loads, two multiply. Rows are gathered as they are loaded and scattered as they are stored; of WEIGHT's
// two factors x is sorted in memory before, since threads alone cannot load as much as the tensor cores take, and two blocks
// of a cluster, whose tiles lie below each other, load half of it each for both.
//
// FORWARD: y[r, c] = Σ x[r / sharers, d] · w[e, c, d]. INPUT: dx[r, c] = Σ dy[r, d] · w[e, d, c]. WEIGHT: dw[e, i, j] = Σ dy[r, i] ·
// x[at, j], where r is at place `at` of the order. Columns and depth are multiples of 64.

enum Kind { FORWARD, INPUT, WEIGHT };

// As in `ops/grouped.rs`.
const int MOST_EXPERTS = 256;
const int BM = 128, BN = 256, BK = 64, STAGES = 4;
// Bytes of a line of a tile: 64 elements, or 128 of one byte.
const int ROW = 128;
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
    const u8 *a;       // FORWARD: x; INPUT, WEIGHT: dy
    void *out;         // [rows, columns]; WEIGHT: sums [experts, lines, columns]
    const int *order;  // rows by expert, -1 where there is none
    const int *starts; // where those of each expert start, the end of all; how many each has; experts, the largest first
    int experts, columns;
    int depth; // FORWARD, INPUT
    int lines; // WEIGHT
    int sharers, kind, add;
    const float *unit, *units; // of bytes: of a, and of every expert's weights
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d (+)= a · b of 64 × 16 and 16 × 256 elements of type T, either of them transposed.
template <typename E>
struct Wgmma;
#define WGMMA(T)                                                                                                       \
    template <>                                                                                                        \
    struct Wgmma<T> {                                                                                                  \
        static const int BYTES = 2;                                                                                    \
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

// A block's tile of weights of a round, if there is one, of this many columns; `row` counts in the expert's lines, and a step of the sum is STEP rows. The
// longest sums come first, and clusters take turns in who gets the longer ones.
template <int COLUMNS, int STEP, typename S>
DEV bool tile_of_weights(const Args &g, const S &s, i64 round, Tile &t) {
    int clusters = gridDim.x / 2, cluster = blockIdx.x / 2, across = (g.columns + COLUMNS - 1) / COLUMNS;
    i64 i = round * clusters + (round & 1 ? clusters - 1 - cluster : cluster);
    int down = (g.lines + 2 * BM - 1) / (2 * BM), per = down * across;
    if (i >= (i64)per * g.experts) return false;
    int at = (int)(i % per);
    t.expert = s.largest[i / per];
    t.row = (at % down * 2 + blockIdx.x % 2) * BM;
    t.column = at / down * COLUMNS;
    t.depth = (s.starts[g.experts + 1 + t.expert] + STEP - 1) / STEP;
    return true;
}

// A block's tile of a round, if there is one. `row` counts in the order of rows, or for WEIGHT in the expert's lines.
template <typename E, int KIND>
DEV bool tile_of(const Args &g, const Shared &s, i64 round, Tile &t) {
    const int *starts = s.starts;
    int across = (g.columns + BN - 1) / BN;
    i64 i = round * gridDim.x + blockIdx.x;
    if (KIND == WEIGHT) return tile_of_weights<BN, BK>(g, s, round, t);
    // Sixteen tiles of rows share columns of the weights while those are in the cache.
    const int BAND = 16;
    int rows = starts[g.experts] / BM;
    if (i >= (i64)rows * across) return false;
    int per = BAND * across, first = (int)(i / per) * BAND, band = min(BAND, rows - first), at = (int)(i % per);
    t.row = (first + at % band) * BM;
    t.column = at / band * BN;
    t.depth = g.depth * Wgmma<E>::BYTES / ROW;
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
template <typename E, int KIND>
DEV void load_tiles(const TensorMap *map, const Args &g, Shared &s) {
    int tid = threadIdx.x, line = tid / 8, chunk = tid % 8;
    int stage = 0, phase = 0;
    // Lines that lie a multiple of eight apart are swizzled alike.
    u32 to = line * 128 + ((chunk ^ (line & 7)) * 16);
    Tile t;
    for (i64 round = 0; tile_of<E, KIND>(g, s, round, t); round++) {
        const int *order = g.order + (KIND == WEIGHT ? s.starts[t.expert] : t.row) + line;
        const u8 *from[BM / LINES];
        int rows[BK / LINES];
        u32 there = 0;
        if (KIND != WEIGHT) {
#pragma unroll
            for (int j = 0; j < BM / LINES; j++) {
                int row = order[j * LINES];
                there |= (u32)(row >= 0) << j;
                from[j] = g.a + (i64)(max(row, 0) / g.sharers) * g.depth * Wgmma<E>::BYTES + chunk * 16;
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
                barrier_expect(full, BN * ROW);
                // Rows of the map: those of weights, or of x in the order of rows.
                int row = KIND == FORWARD ? t.expert * g.columns + t.column
                                          : (KIND == INPUT ? t.expert * g.depth : s.starts[t.expert]) + d * BK;
                if (KIND == FORWARD) load_box(b, map, d * (ROW / Wgmma<E>::BYTES), row, full);
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
                    from[j] += ROW;
                }
            } else {
#pragma unroll
                for (int j = 0; j < BK / LINES; j++) {
                    bool row = rows[j] >= 0;
                    const u8 *dy = g.a + ((i64)max(rows[j], 0) * g.lines + t.row) * 2 + chunk * 16;
                    // Where the next rows are is known by the time they are needed.
                    if (d + 1 < t.depth) rows[j] = order[(d + 1) * BK + j * LINES];
                    load_pack(a + j * LINES * 128, dy, row && there);
                    load_pack(a + 8192 + j * LINES * 128, dy + ROW, row && there > 1);
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
template <typename S, int N>
DEV void store_sums(const TensorMap *map, const Args &g, S &s, const Tile &t, int half, const float (&acc)[N]) {
    int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, r = warp * 16 + lane / 4;
    int first = t.row + half * 64;
    if (g.kind == SUM_BF16) {
        if (first >= g.lines) return;
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
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
    for (int q = 0; q < N / 16; q++) {
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

// What an expert without rows has, of this many columns.
template <int COLUMNS>
DEV void store_zeros(const Args &g, const Tile &t, int half) {
    for (int i = threadIdx.x % 128; i < 64 * COLUMNS; i += 128) {
        int line = t.row + half * 64 + i / COLUMNS, column = t.column + i % COLUMNS;
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

template <typename E, typename T, int KIND>
DEV void multiply_tiles(const TensorMap *map, const Args &g, Shared &s) {
    const int TA = KIND == WEIGHT, TB = KIND != FORWARD;
    int half = (threadIdx.x - LOADERS) / 128, tid = threadIdx.x % 128;
    int stage = 0, phase = 0;
    Tile t;
    for (i64 round = 0; tile_of<E, KIND>(g, s, round, t); round++) {
        float acc[128];
        int to[4];
        if (KIND != WEIGHT) {
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = g.order[t.row + half * 64 + j * 16 + tid / 8];
        }
        if (t.depth == 0) {
            if (!g.add) store_zeros<BN>(g, t, half);
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
                Wgmma<E>::template multiply<TA, TB>(acc, left, right, d > 0 || q > 0);
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
        if (Wgmma<E>::BYTES == 1) {
            float by = *g.unit * g.units[t.expert];
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] *= by;
        }
        if (KIND == WEIGHT) store_sums(map, g, s, t, half, acc);
        else store_rows<T>(g, s, t, half, to, acc);
    }
    if (KIND == WEIGHT && tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <typename S>
DEV void load_starts(const Args &g, S &s) {
    for (int i = threadIdx.x; i <= 2 * g.experts; i += blockDim.x) s.starts[i] = g.starts[i];
    for (int i = threadIdx.x; i < g.experts; i += blockDim.x) s.largest[i] = (u8)g.starts[2 * g.experts + 1 + i];
}

template <typename E, typename T, int KIND>
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
    load_starts(g, s);
    if (KIND == WEIGHT) cluster_barrier();
    else __syncthreads();
    if (threadIdx.x < LOADERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        load_tiles<E, KIND>(from, g, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        multiply_tiles<E, T, KIND>(to, g, s);
    }
    // Neither block ends while the other one writes to its memory.
    if (KIND == WEIGHT) cluster_barrier();
}
#endif
