// Matmuls of few rows, as decoding has them: y = x · wᵀ at the speed at which w is read. The matrix units take 16 rows of w and 8 of x at a time;
// what is missing of 8 rows of x is zero. Warps of a block share the depth, and their sums are added in order. Nothing but the shape of w and the
// room for rows decides how a sum is cut, so in calls with the same room the bits of a row do not depend on the rows beside it.
//
// What stands beside a matmul may be done by it: the norm of its input, which every block makes for itself, and the SwiGLU of its output, for which the
// 16 rows of w are 8 of the gate and 8 of up. Both round as kernels of their own would.

// A step of a warp is 128 bytes of each of 16 rows of w, in parts of 64 elements, of which a lane has 16 of two rows. Which element of the depth is which does
// not matter to a sum as long as both factors agree.
const int PART = 64;

// Weights are not read as constants (`.nc`): ptxas moves such loads below the wait for the kernels before, and then nothing of them comes early.
static __device__ __forceinline__ uint4 stream16(const void *from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

// What a lane has of a step of this many parts: of x, 8 elements of each part from LANE times its number on and 8 from NEXT after them on.
template <typename T, typename W>
struct Step;

// Weights as activations are stored.
template <typename T>
struct Step<T, T> {
    static const int PARTS = 1, LANE = 8, NEXT = 32;
    uint4 low[2], high[2];

    __device__ __forceinline__ void fetch(const T *l, const T *h) {
        low[0] = stream16(l), high[0] = stream16(h);
        low[1] = stream16(l + NEXT), high[1] = stream16(h + NEXT);
    }

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

// Packs of a row that a thread has, where its norm is made: more of them leave room for fewer blocks.
const int NORMED_PACKS = 1;

// The norms of rows in shared memory, by all threads of a block. The norm's weights are there already.
template <typename T, int WARPS>
static __device__ __forceinline__ void norm_into(T *to, const T *x, const Pack<T> *weights, Normed<T> n, int rows, int depth,
                                                 bool stores) {
    __shared__ float squares[WARPS];
    const int P = Pack<T>::N;
    for (int row = 0; row < rows; row++) {
        float v[NORMED_PACKS][P], square = 0.0f;
#pragma unroll
        for (int i = 0; i < NORMED_PACKS; i++) {
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
        for (int i = 0; i < NORMED_PACKS; i++) {
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

// Grid: outputs ÷ those of a block. Where rows of w have units, sums are multiplied by them. `N` is how many times 8 rows of x there may be; TILES of 16 rows of w are a block's; AT_ONCE steps are read ahead.
template <typename T, typename W, int N, int TILES, int WARPS, int AT_ONCE, bool GLU, bool NORM>
static __device__ __forceinline__ void skinny(const T *x, const W *w, const float *units_of_rows, const T *bias, T *y,
                                              int rows, int outputs, int depth, Normed<T> norm) {
    const int SHARES = WARPS / TILES, OUTPUTS = GLU ? 8 : 16;
    extern __shared__ uint4 normed[];
    __shared__ float sums[WARPS][16][8 * N + 1];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int tile = warp % TILES, share = warp / TILES;
    i64 first = (i64)(blockIdx.x * TILES + tile) * OUTPUTS;
    bool here = first < outputs;
    typedef Step<T, W> S;
    const int STEP = S::PARTS * PART;
    const W *low = w + (first + g) * depth + t * S::LANE, *high = low + (i64)(GLU ? outputs : 8) * depth;
    S steps[AT_ONCE];
    auto fetch = [&](int s, int k) {
        if (here && k < depth) steps[s].fetch(low + k, high + k);
    };
    float c[N][4] = {};
    let_next_begin();
    // The first weights come while the kernel before still makes x.
    Pack<T> norm_weights[NORMED_PACKS];
#pragma unroll
    for (int i = 0; NORM && i < NORMED_PACKS; i++) {
        int at = (threadIdx.x + 32 * WARPS * i) * Pack<T>::N;
        if (at < depth) norm_weights[i] = *(const Pack<T> *)(norm.weight + at);
    }
#pragma unroll
    for (int s = 0; s < AT_ONCE; s++) fetch(s, (share + s * SHARES) * STEP);
    // A thread adds sums of one output, whatever the row: a block has a multiple of its outputs as threads.
    int mine = threadIdx.x % (OUTPUTS * TILES);
    i64 output = (i64)blockIdx.x * TILES * OUTPUTS + mine;
    float unit = 1.0f, unit_up = 1.0f;
    if (units_of_rows && output < outputs) {
        unit = units_of_rows[output];
        if (GLU) unit_up = units_of_rows[outputs + output];
    }
    wait_for_those_before();
    if (NORM) norm_into<T, WARPS>((T *)normed, x, norm_weights, norm, rows, depth, !blockIdx.x);
    const T *in = NORM ? (const T *)normed : x;
    for (int k0 = share * STEP; here && k0 < depth; k0 += SHARES * STEP * AT_ONCE) {
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            int k = k0 + s * SHARES * STEP;
            if (k >= depth) break;
#pragma unroll
            for (int p = 0; p < S::PARTS; p++) {
                u32 a[4][4];
                steps[s].pairs(p, a);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    int row = 8 * j + g;
                    const T *from = in + (i64)row * depth + k + p * PART + t * S::LANE;
                    uint4 b = {0, 0, 0, 0}, d = b;
                    if (row < rows) b = *(const uint4 *)from, d = *(const uint4 *)(from + S::NEXT);
                    units<T>(c[j], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
                    units<T>(c[j], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
                    units<T>(c[j], a[2][0], a[2][1], a[2][2], a[2][3], d.x, d.y);
                    units<T>(c[j], a[3][0], a[3][1], a[3][2], a[3][3], d.z, d.w);
                }
            }
            fetch(s, k + SHARES * STEP * AT_ONCE);
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        sums[warp][g][8 * j + 2 * t] = c[j][0], sums[warp][g][8 * j + 2 * t + 1] = c[j][1];
        sums[warp][g + 8][8 * j + 2 * t] = c[j][2], sums[warp][g + 8][8 * j + 2 * t + 1] = c[j][3];
    }
    __syncthreads();
    for (int row = threadIdx.x / (OUTPUTS * TILES); output < outputs && row < rows; row += 32 * WARPS / (OUTPUTS * TILES)) {
        auto total = [&](int of) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SHARES; s++) sum += sums[s * TILES + mine / OUTPUTS][of][row];
            return sum;
        };
        float sum = total(mine % OUTPUTS) * unit;
        T out = Of<T>::f32(bias ? sum + to_f32(bias[output]) : sum);
        if (GLU) {
            float gate = to_f32(out), up = to_f32(Of<T>::f32(total(mine % OUTPUTS + 8) * unit_up));
            out = Of<T>::f32(gate * (1.0f / (1.0f + __expf(-gate))) * up);
        }
        y[row * (i64)outputs + output] = out;
    }
}

// Kernels of a type of activations and one of weights, which are called NAME.
#define SKINNY(T, W, NAME, N, KIND, TILES, WARPS, AT_ONCE, GLU, BOUNDS)                                                \
    extern "C" __global__ void BOUNDS skinny_##N##_##KIND##_##NAME(                                                    \
        const T *x, const W *w, const float *units_of_rows, const T *bias, T *y, int rows, int outputs, int depth) {   \
        skinny<T, W, N, TILES, WARPS, AT_ONCE, GLU, false>(x, w, units_of_rows, bias, y, rows, outputs, depth,         \
                                                           Normed<T>{});                                               \
    }
#define SKINNY_NORM(T, W, NAME, KIND, TILES, AT_ONCE, BLOCKS, GLU)                                                     \
    extern "C" __global__ void __launch_bounds__(512, BLOCKS)                                                          \
        skinny_norm_##KIND##_##NAME(const T *x, const T *delta, const T *weight, T *sum, const W *w,                   \
                                    const float *units_of_rows, T *y, int rows, int outputs, int depth, float eps,     \
                                    float one) {                                                                       \
        skinny<T, W, 1, TILES, 16, AT_ONCE, GLU, true>(x, w, units_of_rows, (const T *)0, y, rows, outputs, depth,     \
                                                       {delta, weight, sum, eps, one});                                \
    }
// How a matmul is cut. With few outputs over all multiprocessors, a deep one over more warps; with more tiles than there are multiprocessors (`many`) two blocks of one
// share it and read less ahead; with many outputs (`wide`) a block has more of them, which share what they read of x.
#define SKINNIES(T, W, NAME)                                                                                           \
    SKINNY(T, W, NAME, 1, narrow, 1, 16, 2, false, __launch_bounds__(512, 1))                                          \
    SKINNY(T, W, NAME, 1, many, 1, 16, 1, false, __launch_bounds__(512, 2))                                            \
    SKINNY(T, W, NAME, 1, deep, 1, 32, 1, false, __launch_bounds__(1024))                                              \
    SKINNY(T, W, NAME, 1, wide, 4, 16, 4, false, __launch_bounds__(512))                                               \
    SKINNY(T, W, NAME, 1, glu, 4, 16, 2, true, __launch_bounds__(512))                                                 \
    SKINNY(T, W, NAME, 2, narrow, 1, 8, 4, false, __launch_bounds__(256))                                              \
    SKINNY(T, W, NAME, 2, deep, 1, 16, 4, false, __launch_bounds__(512))                                               \
    SKINNY(T, W, NAME, 2, wide, 8, 8, 4, false, __launch_bounds__(256))                                                \
    SKINNY(T, W, NAME, 2, glu, 4, 8, 4, true, __launch_bounds__(256))                                                  \
    SKINNY(T, W, NAME, 4, narrow, 1, 8, 4, false, __launch_bounds__(256))                                              \
    SKINNY(T, W, NAME, 4, deep, 1, 16, 4, false, __launch_bounds__(512))                                               \
    SKINNY(T, W, NAME, 4, wide, 8, 8, 4, false, __launch_bounds__(256, 2))                                             \
    SKINNY(T, W, NAME, 4, glu, 4, 8, 4, true, __launch_bounds__(256))                                                  \
    SKINNY_NORM(T, W, NAME, narrow, 2, 4, 1, false)                                                                    \
    SKINNY_NORM(T, W, NAME, middle, 2, 2, 2, false)                                                                    \
    SKINNY_NORM(T, W, NAME, wide, 4, 4, 1, false)                                                                      \
    SKINNY_NORM(T, W, NAME, glu, 4, 2, 2, true)
