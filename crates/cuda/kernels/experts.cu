// Mixtures of experts: rows in the order of their experts, matmuls by it, and sums over a token's experts. A row is one expert of
// a token; `sharers` consecutive rows have one row of x.

// As in `ops/experts.rs`.
const int MOST_EXPERTS = 1024;
// Experts' rows start at multiples of this, so that a tile of rows has one expert.
const int TILE = 128;

// The expert of a row: of `of_experts` to each part, which has `of_part` rows. None where a row has no expert.
static __device__ __forceinline__ u32 expert_of(const u32 *chosen, int row, int of_part, int of_experts) {
    u32 expert = chosen[row];
    return expert < (u32)of_experts ? row / of_part * of_experts + expert : ~0u;
}

// counts[share][e]: how many of a block's `each` rows go to expert e.
extern "C" __global__ void __launch_bounds__(1024)
    count_rows(const u32 *chosen, u32 *counts, int rows, int each, int experts, int of_part, int of_experts) {
    __shared__ u32 found[MOST_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += 1024) found[e] = 0;
    __syncthreads();
    int first = blockIdx.x * each, end = min(first + each, rows);
    for (int i = first + threadIdx.x; i < end; i += 1024) {
        u32 expert = expert_of(chosen, i, of_part, of_experts);
        if (expert != ~0u) atomicAdd(found + expert, 1u);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += 1024) counts[(i64)blockIdx.x * experts + e] = found[e];
}

// order: rows sorted by expert, and of one expert in their order; -1 where there is none. starts[e]: where those of expert e start,
// with the end of all at last; then how many each has; then the experts, those with the most rows first. places, if wanted: where in the
// order each row is, -1 for one without an expert. A block places what it counted.
extern "C" __global__ void __launch_bounds__(1024)
    place_rows(const u32 *chosen, const u32 *counts, int *order, int *starts, int *places, int rows, int each,
               int experts, int of_part, int of_experts) {
    __shared__ int next[MOST_EXPERTS], sizes[MOST_EXPERTS], sums[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = threadIdx.x;
    int before = 0, all = 0;
    if (e < experts)
#pragma unroll 8
        for (int share = 0; share < (int)gridDim.x; share++) {
            int found = counts[(i64)share * experts + e];
            before += share < (int)blockIdx.x ? found : 0;
            all += found;
        }
    int padded = (all + TILE - 1) / TILE * TILE, sum = padded;
    for (int step = 1; step < 32; step <<= 1) {
        int y = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += y;
    }
    if (lane == 31) sums[warp] = sum;
    if (e < experts) sizes[e] = all;
    __syncthreads();
    if (warp == 0) {
        int whole = sums[lane];
        for (int step = 1; step < 32; step <<= 1) {
            int y = __shfl_up_sync(~0u, whole, step);
            if (lane >= step) whole += y;
        }
        sums[lane] = whole;
    }
    __syncthreads();
    int start = (warp ? sums[warp - 1] : 0) + sum - padded;
    if (e < experts) {
        next[e] = start + before;
        if (blockIdx.x == 0) {
            starts[e] = start;
            starts[experts + 1 + e] = all;
            if (e == experts - 1) starts[experts] = start + padded;
            for (int i = all; i < padded; i++) order[start + i] = -1;
            int larger = 0;
            for (int other = 0; other < experts; other++)
                larger += sizes[other] > all || (sizes[other] == all && other < e);
            starts[2 * experts + 1 + larger] = e;
        }
    }
    // Warps take turns, so that rows keep their order.
    int first = blockIdx.x * each, end = min(first + each, rows);
    for (int chunk = first; chunk < end; chunk += 1024) {
        int row = chunk + threadIdx.x;
        u32 expert = row < end ? expert_of(chosen, row, of_part, of_experts) : ~0u;
        u32 same = __match_any_sync(~0u, expert);
        int rank = __popc(same & ((1u << lane) - 1));
        for (int turn = 0; turn < 32; turn++) {
            __syncthreads();
            if (turn != warp) continue;
            int at = expert != ~0u ? next[expert] : 0;
            __syncwarp();
            if (places && row < end) places[row] = expert == ~0u ? -1 : at + rank;
            if (expert == ~0u) continue;
            order[at + rank] = row;
            if (rank == 0) next[expert] = at + __popc(same);
        }
    }
}

// Places of the choices that go to a block's part of the experts, in their order, and the experts of its places; ~0 for a choice beyond
// `rows`, of which `beyond` counts those of every sequence, and for a place without a row.
extern "C" __global__ void __launch_bounds__(1024)
    expert_slots(const u32 *chosen, u32 *slots, u32 *owners, double *beyond, int choices, int each, int rows,
                 int of_sequence) {
    __shared__ int found[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, filled = 0;
    u32 part = blockIdx.x, last = gridDim.x * each - 1;
    if (owners) owners += (i64)part * rows;
    for (int chunk = 0; chunk < choices; chunk += 1024) {
        int i = chunk + threadIdx.x;
        u32 expert = i < choices ? min(chosen[i], last) : ~0u;
        bool here = i < choices && expert / each == part;
        u32 same = __ballot_sync(~0u, here);
        __syncthreads();
        if (lane == 0) found[warp] = __popc(same);
        __syncthreads();
        int before = filled + __popc(same & ((1u << lane) - 1));
        for (int w = 0; w < 32; w++) {
            before += w < warp ? found[w] : 0;
            filled += found[w];
        }
        if (!here) continue;
        if (slots) slots[i] = before < rows ? part * rows + before : ~0u;
        if (owners && before < rows) owners[before] = expert % each;
        if (beyond && before >= rows) atomicAdd(beyond + i / of_sequence, 1.0);
    }
    if (owners)
        for (int i = min(filled, rows) + threadIdx.x; i < rows; i += 1024) owners[i] = ~0u;
}

// sorted[places[r]] = x[r / sharers], of any type, so that x is read once; zeros after the rows of each expert, up to a multiple of 64. A warp has a row of x,
// a block in front of those with rows the zeros of an expert.
extern "C" __global__ void __launch_bounds__(256)
    scatter_rows(const Pack<u16> *x, Pack<u16> *sorted, const int *places, const int *starts, i64 rows, int experts,
                 int packs, int sharers) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if ((int)blockIdx.x < experts) {
        int count = starts[experts + 1 + blockIdx.x], end = (count + 63) / 64 * 64;
        sorted += (i64)starts[blockIdx.x] * packs;
        for (int r = count + warp; r < end; r += 8)
            for (int i = lane; i < packs; i += 32) sorted[(i64)r * packs + i] = {};
        return;
    }
    i64 from = (i64)(blockIdx.x - experts) * 8 + warp;
    places += from * sharers;
    x += from * packs;
    if (from * sharers >= rows) return;
    // Several are under way before the first is stored.
    for (int i = lane; i < packs; i += 32 * 8) {
        Pack<u16> p[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (i + j * 32 < packs) p[j] = x[i + j * 32];
        for (int c = 0; c < sharers; c++) {
            int to = places[c];
            if (to < 0) continue;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i + j * 32 < packs) sorted[(i64)to * packs + i + j * 32] = p[j];
        }
    }
}

// to[c, at] = x[order[at] / sharers, c], bytes, zeros at places without a row. A block has a tile of 128 places and 128 columns; a thread has 8 columns of 4
// places at a time, so that 4 places of a column are a word. `pitch` places lie between two columns.
extern "C" __global__ void __launch_bounds__(256)
    sort_bytes(const u8 *x, u8 *to, const int *order, const int *starts, int experts, i64 columns, i64 pitch,
               int sharers) {
    // A word more in each line, and lines turned by pairs: what the threads of a warp store lies in different banks.
    __shared__ u32 tile[TILE * (TILE / 4 + 1)];
    i64 first = (i64)blockIdx.x * TILE;
    if (first >= starts[experts]) return;
    int pack = threadIdx.x & 15, turn = 2 * (pack >> 2);
    i64 column = (i64)blockIdx.y * TILE + pack * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int line = (threadIdx.x >> 4) + half * 16;
        if (column >= columns) continue;
        u64 v[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int row = order[first + line * 4 + r];
            v[r] = row < 0 ? 0 : *(const u64 *)(x + (i64)(row / sharers) * columns + column);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
            u32 word = 0;
#pragma unroll
            for (int r = 0; r < 4; r++) word |= (u32)(v[r] >> (8 * c) & 0xff) << (8 * r);
            tile[(pack * 8 + c) * (TILE / 4 + 1) + ((line + turn) & (TILE / 4 - 1))] = word;
        }
    }
    __syncthreads();
    int lane = threadIdx.x & 31;
    for (int c = threadIdx.x >> 5; c < TILE; c += 8) {
        i64 line = (i64)blockIdx.y * TILE + c;
        if (line >= columns) continue;
        *(u32 *)(to + line * pitch + first + lane * 4) =
            tile[c * (TILE / 4 + 1) + ((lane + 2 * (c >> 5)) & (TILE / 4 - 1))];
    }
}

// Bytes of fp8.
struct e4m3 {
    u8 bits;
};
struct e5m2 {
    u8 bits;
};

static __device__ __forceinline__ float to_f32(e4m3 x) {
    u32 y = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)x.bits));
#endif
    return to_f32(f16{(u16)y});
}
static __device__ __forceinline__ float to_f32(e5m2 x) { return to_f32(f16{(u16)(x.bits << 8)}); }

// Plain matmuls: a block of 256 threads has a tile of 64 × 64, a thread 4 × 4 of it. Right in every type and shape, and slow.
const int SIDE = 64, DEPTH = 16;

struct Tiles {
    float a[DEPTH][SIDE + 4], b[DEPTH][SIDE + 4];
    int rows[SIDE];
};

static __device__ __forceinline__ void multiply(const Tiles &t, float acc[4][4]) {
    int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 4;
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[i][j] += t.a[d][r + i] * t.b[d][c + j];
}

// out[r, c] = Σ a[r / sharers, d] · w[e, c, d], or · w[e, d, c] where `across`, with e the expert of row r.
template <typename A, typename W, typename T>
static __device__ void grouped_rows(const A *a, const W *w, T *out, const int *order, const int *starts, int experts,
                                    int columns, int depth, int sharers, int across, const float *unit,
                                    const float *units) {
    __shared__ Tiles t;
    int first = blockIdx.x * SIDE, column = blockIdx.y * SIDE;
    if (first >= starts[experts]) return;
    // The last expert that starts here or before; those without rows start where the next does.
    int low = 0, high = experts;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (starts[middle] <= first ? low : high) = middle;
    }
    w += (i64)low * columns * depth;
    float by = unit ? *unit * units[low] : 1.0f;
    if (threadIdx.x < SIDE) t.rows[threadIdx.x] = order[first + threadIdx.x];
    float acc[4][4] = {};
    for (int d0 = 0; d0 < depth; d0 += DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < SIDE * DEPTH; i += 256) {
            int r = i / DEPTH, d = i % DEPTH, row = t.rows[r];
            bool there = d0 + d < depth;
            t.a[d][r] = there && row >= 0 ? to_f32(a[(i64)(row / sharers) * depth + d0 + d]) : 0.0f;
            int c = r;
            if (across) {
                c = i % SIDE;
                d = i / SIDE;
                there = d0 + d < depth;
            }
            i64 at = across ? (i64)(d0 + d) * columns + column + c : (i64)(column + c) * depth + d0 + d;
            t.b[d][c] = there && column + c < columns ? to_f32(w[at]) : 0.0f;
        }
        __syncthreads();
        multiply(t, acc);
    }
    int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (t.rows[r + i] >= 0 && column + c + j < columns)
                out[(i64)t.rows[r + i] * columns + column + c + j] = Of<T>::f32(by * acc[i][j]);
}

// dw[e, i, j] (+)= Σ dy[r, i] · x[r / sharers, j] over the rows of expert e; sums in fixed point take a sequence's rows at a time.
template <typename A, typename B>
static __device__ void grouped_weight(const A *dy, const B *x, void *dw, const int *order, const int *starts,
                                      int experts, int n, int k, int sharers, int kind, int add, int of_sequence,
                                      const float *unit, const float *other) {
    __shared__ Tiles t;
    int e = blockIdx.z, i0 = blockIdx.y * SIDE, j0 = blockIdx.x * SIDE;
    int at = starts[e], end = at + starts[experts + 1 + e];
    int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 4;
    float by = unit ? *unit * *other : 1.0f;
    do {
        int stop = end;
        if (kind == SUM_FIXED && at < end) {
            int sequence = order[at] / of_sequence;
            for (stop = at; stop < end && order[stop] / of_sequence == sequence;) stop++;
        }
        float acc[4][4] = {};
        for (; at < stop; at += DEPTH) {
            __syncthreads();
            for (int i = threadIdx.x; i < SIDE * DEPTH; i += 256) {
                int d = i / SIDE, column = i % SIDE;
                i64 row = at + d < stop ? order[at + d] : -1;
                t.a[d][column] = row >= 0 && i0 + column < n ? to_f32(dy[row * n + i0 + column]) : 0.0f;
                t.b[d][column] = row >= 0 && j0 + column < k ? to_f32(x[row / sharers * k + j0 + column]) : 0.0f;
            }
            __syncthreads();
            multiply(t, acc);
        }
        at = stop;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i0 + r + i < n && j0 + c + j < k)
                    sum_write(dw, kind, ((i64)e * n + i0 + r + i) * k + j0 + c + j, by * acc[i][j], add);
        add = 1;
    } while (at < end);
}

// out[token] = Σ y[token, choice], by their weights where there are any. A block has a token.
template <typename T>
static __device__ void combine(const T *y, const float *weights, T *out, int choices, int d, int wide) {
    const int N = Pack<T>::N;
    i64 token = blockIdx.x;
    y += token * choices * d;
    out += token * d;
    if (weights) weights += token * choices;
    if (wide) {
        for (int i = threadIdx.x * N; i < d; i += blockDim.x * N) {
            float sum[N] = {}, x[N];
#pragma unroll 4
            for (int c = 0; c < choices; c++) {
                float by = weights ? weights[c] : 1.0f;
                load(y + (i64)c * d + i, x);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += by * x[j];
            }
            store(out + i, sum);
        }
    } else {
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float sum = 0.0f;
            for (int c = 0; c < choices; c++) sum += (weights ? weights[c] : 1.0f) * to_f32(y[(i64)c * d + i]);
            out[i] = Of<T>::f32(sum);
        }
    }
}

// dy = weight · dout, dweight = dout · y; a warp has a row. dy may be in y's place; either result may be null.
template <typename T>
static __device__ void combine_grad(const T *dout, const T *y, const float *weights, T *dy, float *dweights, i64 rows,
                                    int choices, int d, int wide) {
    const int N = Pack<T>::N;
    i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (row >= rows) return;
    dout += row / choices * d;
    y += row * d;
    dy += dy ? row * d : 0;
    float by = weights[row], dot = 0.0f;
    if (wide) {
        const int AT_ONCE = 4, STEP = 32 * N;
        for (int i = lane * N; i < d; i += AT_ONCE * STEP) {
            Pack<T> p[AT_ONCE] = {}, q[AT_ONCE] = {};
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                if (i + u * STEP < d) {
                    p[u] = *(const Pack<T> *)(dout + i + u * STEP);
                    q[u] = *(const Pack<T> *)(y + i + u * STEP);
                }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                float a[N], b[N];
                unpack(p[u], a);
                unpack(q[u], b);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    dot += a[j] * b[j];
                    a[j] *= by;
                }
                if (dy && i + u * STEP < d) store(dy + i + u * STEP, a);
            }
        }
    } else {
        for (int i = lane; i < d; i += 32) {
            float a = to_f32(dout[i]);
            dot += a * to_f32(y[i]);
            if (dy) dy[i] = Of<T>::f32(by * a);
        }
    }
    dot = warp_sum(dot);
    if (dweights && lane == 0) dweights[row] = dot;
}

// rows[slots[i]] = x[i / sharers] for every choice that has a place; a warp has a choice.
template <typename T>
static __device__ void send_rows(const T *x, const u32 *slots, T *rows, int choices, int places, int d, int sharers) {
    i64 i = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= choices || slots[i] >= (u32)places) return;
    x += i / sharers * d;
    rows += (i64)slots[i] * d;
    for (int c = threadIdx.x & 31; c < d; c += 32) rows[c] = x[c];
}

// y[i] = rows[slots[i]], NaN where a choice has no place; a warp has a choice.
template <typename T>
static __device__ void take_rows(const T *rows, const u32 *slots, T *y, int choices, int places, int d) {
    i64 i = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= choices) return;
    bool there = slots[i] < (u32)places;
    rows += there ? (i64)slots[i] * d : 0;
    y += i * d;
    for (int c = threadIdx.x & 31; c < d; c += 32) y[c] = there ? rows[c] : Of<T>::f32(__int_as_float(0x7fffffff));
}

#define EXPERTS(T, NAME)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        plain_rows_##NAME(const T *a, const T *w, T *out, const int *order, const int *starts, int experts,          \
                            int columns, int depth, int sharers, int across) {                                         \
        grouped_rows(a, w, out, order, starts, experts, columns, depth, sharers, across, 0, 0);                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        plain_weight_##NAME(const T *dy, const T *x, void *dw, const int *order, const int *starts, int experts,     \
                              int n, int k, int sharers, int kind, int add, int of_sequence) {                         \
        grouped_weight(dy, x, dw, order, starts, experts, n, k, sharers, kind, add, of_sequence, 0, 0);                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        send_rows_##NAME(const T *x, const u32 *slots, T *rows, int choices, int places, int d, int sharers) {         \
        send_rows<T>(x, slots, rows, choices, places, d, sharers);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        take_rows_##NAME(const T *rows, const u32 *slots, T *y, int choices, int places, int d) {                      \
        take_rows<T>(rows, slots, y, choices, places, d);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void combine_##NAME(const T *y, const float *weights, T *out, int choices, int d,            \
                                              int wide) {                                                              \
        combine<T>(y, weights, out, choices, d, wide);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void combine_grad_##NAME(const T *dout, const T *y, const float *weights, T *dy,             \
                                                   float *dweights, i64 rows, int choices, int d, int wide) {          \
        combine_grad<T>(dout, y, weights, dy, dweights, rows, choices, d, wide);                                       \
    }
EXPERTS(float, f32)
EXPERTS(bf16, bf16)
EXPERTS(f16, f16)

#define EXPERTS_OF_BYTES(A)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        plain_rows_##A(const A *a, const e4m3 *w, bf16 *out, const int *order, const int *starts, int experts,       \
                         int columns, int depth, int sharers, int across, const float *unit, const float *units) {     \
        grouped_rows(a, w, out, order, starts, experts, columns, depth, sharers, across, unit, units);                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        plain_weight_##A(const A *dy, const e4m3 *x, void *dw, const int *order, const int *starts, int experts,     \
                           int n, int k, int sharers, int kind, int add, int of_sequence, const float *unit,           \
                           const float *other) {                                                                       \
        grouped_weight(dy, x, dw, order, starts, experts, n, k, sharers, kind, add, of_sequence, unit, other);         \
    }
EXPERTS_OF_BYTES(e4m3)
EXPERTS_OF_BYTES(e5m2)
