// Matmuls of few rows, as decoding has them: y = x · wᵀ at the speed at which w is read. The matrix units take 16 rows of w and 8 of x at a time;
// what is missing of 8 rows of x is zero. Warps of a block share the depth, and so do the blocks of a cluster; their sums are added in order. Nothing but the
// shape of w and the room for rows decides how a sum is cut, so in calls with the same room the bits of a row do not depend on the rows beside it.
//
// Weights come by asynchronous copies into a ring in shared memory. A lane copies what it reads itself, so no barrier is needed, and few registers: blocks of
// the next kernel find room beside those of this one, and ask for their first weights while it ends.
//
// What stands beside a matmul may be done by it: the norm of its input, which every block makes for itself, and the SwiGLU of its output, for which the
// 16 rows of w are 8 of the gate and 8 of up. Both round as kernels of their own would.

// A step of a warp is 128 bytes of each of 16 rows of w, in parts of 64 elements, of which a lane has 16 of two rows. Which element of the depth is which does
// not matter to a sum as long as both factors agree.
const int PART = 64;

// What a lane has of 16 rows of w in a ring: four packs, each 32 packs after the one before.
const int PACKS_OF_STEP = 128;

static __device__ __forceinline__ void bring(uint4 *to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
static __device__ __forceinline__ void brought() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
static __device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Blocks of a cluster. GPUs before Hopper have none: there the first block of those that would share a depth has all of it.
#if __CUDA_ARCH__ >= 900
#define CLUSTER(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
const bool CLUSTERS = true;
static __device__ __forceinline__ void put_there(float *at, int block, float x) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}" ::"r"(shared_address(at)),
                 "r"(block), "f"(x)
                 : "memory");
}
static __device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#else
#define CLUSTER(BLOCKS)
const bool CLUSTERS = false;
static __device__ __forceinline__ void put_there(float *, int, float) {}
static __device__ __forceinline__ void arrive_at_cluster() {}
static __device__ __forceinline__ void wait_for_cluster() {}
#endif

// Of a step of this many parts a lane has, of x, 8 elements of each part from LANE times its number on and 8 from NEXT after them on; of a row of w a pack, and
// another SECOND elements after it.
template <typename T, typename W>
struct Step;

// Weights as activations are stored.
template <typename T>
struct Step<T, T> {
    static const int PARTS = 1, LANE = 8, NEXT = 32, SECOND = 32;
    uint4 low[2], high[2];

    // A part as the matrix units take it: four times two pairs of both rows.
    __device__ __forceinline__ void pairs(int, u32 (&a)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i][0] = low[i].x, a[2 * i][1] = high[i].x, a[2 * i][2] = low[i].y, a[2 * i][3] = high[i].y;
            a[2 * i + 1][0] = low[i].z, a[2 * i + 1][1] = high[i].z, a[2 * i + 1][2] = low[i].w, a[2 * i + 1][3] = high[i].w;
        }
    }
};

// What the rows of x are the RMS norm of, where they are: x, or x + delta, whose sum is stored by one block.
template <typename T>
struct Normed {
    const T *delta, *weight;
    T *sum;
    float eps, one;
};

// The longest rows whose norm a matmul makes, and the packs of one that a thread has.
const int MOST_NORMED = 4096;
template <typename T, int WARPS>
constexpr int NORMED_PACKS = 32 * WARPS * Pack<T>::N < MOST_NORMED ? MOST_NORMED / (32 * WARPS * Pack<T>::N) : 1;

// The norms of rows in shared memory, by all threads of a block. The norm's weights are there already.
template <typename T, int WARPS>
static __device__ __forceinline__ void norm_into(T *to, const T *x, const Pack<T> *weights, Normed<T> n, int rows, int depth,
                                                 bool stores) {
    __shared__ float squares[WARPS];
    const int P = Pack<T>::N, PACKS = NORMED_PACKS<T, WARPS>;
    for (int row = 0; row < rows; row++) {
        float v[PACKS][P], square = 0.0f;
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            int at = (threadIdx.x + 32 * WARPS * i) * P;
            if (at >= depth) break;
            load(x + (i64)row * depth + at, v[i]);
            if (n.delta) {
                float d[P];
                load(n.delta + (i64)row * depth + at, d);
#pragma unroll
                for (int j = 0; j < P; j++) v[i][j] = to_f32(Of<T>::f32(v[i][j] + d[j]));
                if (stores) store(n.sum + (i64)row * depth + at, v[i]);
            }
#pragma unroll
            for (int j = 0; j < P; j++) square += v[i][j] * v[i][j];
        }
        square = warp_sum(square);
        if (!(threadIdx.x & 31)) squares[threadIdx.x >> 5] = square;
        __syncthreads();
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += squares[w];
        float r = rsqrtf(all / depth + n.eps);
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            int at = (threadIdx.x + 32 * WARPS * i) * P;
            if (at >= depth) break;
            float weight[P];
            unpack(weights[i], weight);
#pragma unroll
            for (int j = 0; j < P; j++) v[i][j] = v[i][j] * r * (weight[j] + n.one);
            store(to + row * depth + at, v[i]);
        }
        __syncthreads();
    }
}

// Grid: outputs ÷ those of a block, times SPLIT. Where rows of w have units, sums are multiplied by them. `N` is how many times 8 rows of x there may be; TILES times 16
// rows of w are a block's, whose warps have the depth by turns; STAGES steps of each are read ahead; SPLIT blocks of a cluster share the depth.
template <typename T, typename W, int N, int TILES, int WARPS, int STAGES, int SPLIT, bool GLU, bool NORM>
static __device__ __forceinline__ void skinny(const T *x, const W *w, const float *units_of_rows, const T *bias, T *y,
                                              int rows, int outputs, int depth, Normed<T> norm) {
    typedef Step<T, W> S;
    const int LINES = 16 * TILES, OUTPUTS = GLU ? 8 * TILES : LINES, ROOM = 8 * N, PITCH = LINES + 1;
    const int STEP = S::PARTS * PART, SHARE = LINES * ROOM / SPLIT, PACKS = NORM ? NORMED_PACKS<T, WARPS> : 1;
    // The ring, which sums take over, and after it the norms of rows.
    extern __shared__ uint4 ring[];
    __shared__ float parts[SPLIT > 1 ? LINES * ROOM : 1];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, split = blockIdx.x % SPLIT;
    if (SPLIT > 1 && !CLUSTERS && split) return;
    i64 first = (i64)(blockIdx.x / SPLIT) * OUTPUTS, to_high = (i64)(GLU ? outputs : 8) * depth;
    int all = depth / STEP, shares = CLUSTERS ? SPLIT : 1, end = all * (split + 1) / shares;
    uint4 *mine = ring + warp * STAGES * TILES * PACKS_OF_STEP + lane;
    const W *low[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        // Past the last row others are read, and their sums not stored.
        i64 row = first + i * (GLU ? 8 : 16);
        low[i] = w + ((row < outputs ? row : 0) + g) * depth + t * S::LANE;
    }
    auto fetch = [&](int slot, int step) {
        if (step < end) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const W *from = low[i] + step * STEP;
                uint4 *to = mine + (slot * TILES + i) * PACKS_OF_STEP;
                bring(to, from), bring(to + 32, from + S::SECOND);
                bring(to + 64, from + to_high), bring(to + 96, from + to_high + S::SECOND);
            }
        }
        brought();
    };
    let_next_begin();
    // The first weights come while the kernels before still make x.
    int step = all * split / shares + warp;
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(s, step + s * WARPS);
    Pack<T> norm_weights[PACKS];
#pragma unroll
    for (int i = 0; NORM && i < PACKS; i++) {
        int at = (threadIdx.x + 32 * WARPS * i) * Pack<T>::N;
        if (at < depth) norm_weights[i] = *(const Pack<T> *)(norm.weight + at);
    }
    // A thread adds sums of one row of w, whatever the row of x: a block has a multiple of its rows, or of its outputs, as threads.
    auto line_of = [&] {
        int i = threadIdx.x % (SPLIT > 1 ? LINES : OUTPUTS);
        return GLU && SPLIT == 1 ? i / 8 * 16 + i % 8 : i;
    };
    auto output_of = [&](int line) { return first + (GLU ? line / 16 * 8 + line % 16 : line); };
    auto is_stored = [&](int line) { return output_of(line) < outputs && !(GLU && line % 16 >= 8); };
    // Those of 16 bits have no units, and no registers for them.
    float unit = 1.0f, unit_up = 1.0f;
    if (S::PARTS > 1 && units_of_rows && is_stored(line_of())) {
        i64 output = output_of(line_of());
        unit = units_of_rows[output];
        if (GLU) unit_up = units_of_rows[outputs + output];
    }
    if (SPLIT > 1) arrive_at_cluster();
    wait_for_those_before();
    const T *in = x;
    if (NORM) {
        T *normed = (T *)(ring + WARPS * STAGES * TILES * PACKS_OF_STEP);
        norm_into<T, WARPS>(normed, x, norm_weights, norm, rows, depth, !blockIdx.x);
        in = normed;
    }
    // Of x, the next part is read while the matrix units have the one before.
    uint4 b[N], d[N];
    auto take = [&](int step, int part) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const T *from = in + (i64)(8 * j + g) * depth + step * STEP + part * PART + t * S::LANE;
            if (8 * j + g < rows && step < end) b[j] = *(const uint4 *)from, d[j] = *(const uint4 *)(from + S::NEXT);
        }
    };
#pragma unroll
    for (int j = 0; j < N; j++) b[j] = d[j] = uint4{0, 0, 0, 0};
    take(step, 0);
    float c[TILES][N][4] = {};
    for (int slot = 0; step < end; step += WARPS) {
        wait_for_all_but<STAGES - 1>();
#pragma unroll
        for (int p = 0; p < S::PARTS; p++) {
            uint4 b_now[N], d_now[N];
#pragma unroll
            for (int j = 0; j < N; j++) b_now[j] = b[j], d_now[j] = d[j];
            take(p + 1 < S::PARTS ? step : step + WARPS, (p + 1) % S::PARTS);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const uint4 *at = mine + (slot * TILES + i) * PACKS_OF_STEP;
                S now;
                now.low[0] = at[0], now.low[1] = at[32], now.high[0] = at[64], now.high[1] = at[96];
                u32 a[4][4];
                now.pairs(p, a);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    units<T>(c[i][j], a[0][0], a[0][1], a[0][2], a[0][3], b_now[j].x, b_now[j].y);
                    units<T>(c[i][j], a[1][0], a[1][1], a[1][2], a[1][3], b_now[j].z, b_now[j].w);
                    units<T>(c[i][j], a[2][0], a[2][1], a[2][2], a[2][3], d_now[j].x, d_now[j].y);
                    units<T>(c[i][j], a[3][0], a[3][1], a[3][2], a[3][3], d_now[j].z, d_now[j].w);
                }
            }
        }
        fetch(slot, step + STAGES * WARPS);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    wait_for_all_but<0>();
    __syncthreads();
    float *sums = (float *)ring;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                sums[(warp * ROOM + 8 * j + 2 * t + (k & 1)) * PITCH + 16 * i + g + 8 * (k >> 1)] = c[i][j][k];
        }
    }
    __syncthreads();
    int line = line_of();
    i64 output = output_of(line);
    bool stores = is_stored(line);
    auto total = [&](int row, int of) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < WARPS; s++) sum += sums[(s * ROOM + row) * PITCH + of];
        return sum;
    };
    auto finish = [&](int row, float sum, float sum_up) {
        if (!stores || row >= rows) return;
        sum *= unit;
        T out = Of<T>::f32(bias ? sum + to_f32(bias[output]) : sum);
        if (GLU) {
            float gate = to_f32(out), up = to_f32(Of<T>::f32(sum_up * unit_up));
            out = Of<T>::f32(gate * (1.0f / (1.0f + __expf(-gate))) * up);
        }
        y[row * (i64)outputs + output] = out;
    };
    if (SPLIT == 1) {
        for (int row = threadIdx.x / OUTPUTS; row < rows; row += 32 * WARPS / OUTPUTS)
            finish(row, total(row, line), GLU ? total(row, line + 8) : 0.0f);
        return;
    }
    // Each block of the cluster finishes some rows of x: it gets their sums from all.
    wait_for_cluster();
    for (int e = threadIdx.x; e < LINES * ROOM; e += 32 * WARPS) {
        float sum = total(e / LINES, line);
        if (CLUSTERS) put_there(parts + split * SHARE + e % SHARE, e / SHARE, sum);
        else parts[e] = sum;
    }
    arrive_at_cluster(), wait_for_cluster();
    if (!CLUSTERS) __syncthreads();
    for (int e = threadIdx.x; e < LINES * ROOM / shares; e += 32 * WARPS) {
        float sum = 0.0f, sum_up = 0.0f;
        for (int s = 0; stores && s < shares; s++) sum += parts[s * SHARE + e], sum_up += GLU ? parts[s * SHARE + e + 8] : 0.0f;
        finish(split * (ROOM / SPLIT) + e / LINES, sum, sum_up);
    }
}

// Kernels of a type of activations and one of weights, which are called NAME.
#define SKINNY(T, W, NAME, N, KIND, TILES, WARPS, STAGES, SPLIT, GLU, BLOCKS)                                          \
    extern "C" __global__ void CLUSTER(SPLIT) __launch_bounds__(32 * WARPS, BLOCKS) skinny_##N##_##KIND##_##NAME(      \
        const T *x, const W *w, const float *units_of_rows, const T *bias, T *y, int rows, int outputs, int depth) {   \
        skinny<T, W, N, TILES, WARPS, STAGES, SPLIT, GLU, false>(x, w, units_of_rows, bias, y, rows, outputs, depth,   \
                                                                 Normed<T>{});                                         \
    }
#define SKINNY_NORM(T, W, NAME, KIND, TILES, WARPS, STAGES, GLU, BLOCKS)                                               \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                                   \
        skinny_norm_##KIND##_##NAME(const T *x, const T *delta, const T *weight, T *sum, const W *w,                   \
                                    const float *units_of_rows, T *y, int rows, int outputs, int depth, float eps,     \
                                    float one) {                                                                       \
        skinny<T, W, 1, TILES, WARPS, STAGES, 1, GLU, true>(x, w, units_of_rows, (const T *)0, y, rows, outputs,       \
                                                            depth, {delta, weight, sum, eps, one});                    \
    }
// How a matmul is cut, as `ops/linear.rs` has it; AHEAD steps are read ahead of a narrow one of a row. More tiles of a block share what it reads of x, which counts
// with many rows; where there are few outputs, clusters share the depth.
#define SKINNIES(T, W, NAME, AHEAD)                                                                                    \
    SKINNY(T, W, NAME, 1, narrow, 1, 16, AHEAD, 1, false, 2)                                                           \
    SKINNY(T, W, NAME, 1, deep, 1, 32, 2, 1, false, 1)                                                                 \
    SKINNY(T, W, NAME, 1, wide, 2, 8, 2, 1, false, 3)                                                                  \
    SKINNY(T, W, NAME, 1, glu, 2, 8, 2, 1, true, 3)                                                                    \
    SKINNY(T, W, NAME, 2, narrow, 2, 8, 3, 2, false, 2)                                                                \
    SKINNY(T, W, NAME, 2, deep, 2, 4, 4, 4, false, 3)                                                                  \
    SKINNY(T, W, NAME, 2, wide, 4, 4, 2, 1, false, 3)                                                                  \
    SKINNY(T, W, NAME, 2, glu, 4, 4, 3, 1, true, 2)                                                                    \
    SKINNY(T, W, NAME, 4, narrow, 2, 8, 3, 2, false, 2)                                                                \
    SKINNY(T, W, NAME, 4, deep, 2, 4, 4, 4, false, 3)                                                                  \
    SKINNY(T, W, NAME, 4, wide, 4, 4, 2, 1, false, 3)                                                                  \
    SKINNY(T, W, NAME, 4, glu, 4, 4, 3, 1, true, 2)                                                                    \
    SKINNY_NORM(T, W, NAME, narrow, 1, 16, 2, false, 2)                                                                \
    SKINNY_NORM(T, W, NAME, middle, 1, 8, 2, false, 4)                                                                 \
    SKINNY_NORM(T, W, NAME, wide, 2, 8, 2, false, 3)                                                                   \
    SKINNY_NORM(T, W, NAME, glu, 2, 8, 2, true, 3)
