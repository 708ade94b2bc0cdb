// Norms, with and without a residual addition before them, and their gradients. RMS norms divide by the root of the mean square;
// layer norms take the mean off first and have a bias. `one` is added to weights: 1 where they are stored less 1, else 0.

// One row per block, kept in registers: thread t has packs t, t + threads, … of the row.
template <typename T, int CHUNKS, bool ADD, bool MEAN>
static __device__ __forceinline__ void norm_row(const T *x, const T *delta, const T *w, const T *bias, T *sum, T *y, float *mean, float *rstd,
                                int d, float eps, float one) {
    __shared__ float shared[32];
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    x += row * d;
    float v[CHUNKS][N];
    float total = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = (c * blockDim.x + threadIdx.x) * N;
        if (i >= d) continue;
        load(x + i, v[c]);
        if (ADD) {
            float other[N];
            load(delta + row * d + i, other);
#pragma unroll
            for (int j = 0; j < N; j++) v[c][j] += other[j];
            store(sum + row * d + i, v[c]);
            // The norm is of what is stored.
#pragma unroll
            for (int j = 0; j < N; j++) v[c][j] = to_f32(Of<T>::f32(v[c][j]));
        }
        if (MEAN) {
#pragma unroll
            for (int j = 0; j < N; j++) total += v[c][j];
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) squares += v[c][j] * v[c][j];
        }
    }
    if (MEAN) {
        total = block_sum(total, shared) / d;
        if (mean && threadIdx.x == 0) mean[row] = total;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int i = (c * blockDim.x + threadIdx.x) * N;
            if (i >= d) continue;
#pragma unroll
            for (int j = 0; j < N; j++) {
                v[c][j] -= total;
                squares += v[c][j] * v[c][j];
            }
        }
    }
    float r = rsqrtf(block_sum(squares, shared) / d + eps);
    if (rstd && threadIdx.x == 0) rstd[row] = r;
    if (!y) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = (c * blockDim.x + threadIdx.x) * N;
        if (i >= d) continue;
        float weight[N], more[N];
        load(w + i, weight);
        if (MEAN) load(bias + i, more);
#pragma unroll
        for (int j = 0; j < N; j++) v[c][j] = v[c][j] * r * (weight[j] + one) + (MEAN ? more[j] : 0.0f);
        store(y + row * d + i, v[c]);
    }
}

// Rows of any length.
template <typename T, bool ADD, bool MEAN>
static __device__ __forceinline__ void norm_any(const T *x, const T *delta, const T *w, const T *bias, T *sum, T *y, float *mean, float *rstd,
                                int d, float eps, float one) {
    __shared__ float shared[32];
    i64 row = blockIdx.x;
    float total = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float v = to_f32(x[row * d + i]);
        if (ADD) {
            T s = Of<T>::f32(v + to_f32(delta[row * d + i]));
            sum[row * d + i] = s;
            v = to_f32(s);
        }
        total += v;
    }
    const T *in = ADD ? sum : x;
    float m = 0.0f;
    if (MEAN) {
        m = block_sum(total, shared) / d;
        if (mean && threadIdx.x == 0) mean[row] = m;
    }
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float v = to_f32(in[row * d + i]) - m;
        squares += v * v;
    }
    float r = rsqrtf(block_sum(squares, shared) / d + eps);
    if (rstd && threadIdx.x == 0) rstd[row] = r;
    if (!y) return;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float v = (to_f32(in[row * d + i]) - m) * r * (to_f32(w[i]) + one);
        y[row * d + i] = Of<T>::f32(MEAN ? v + to_f32(bias[i]) : v);
    }
}

#define NORM_ONE(T, KERNEL, BODY)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) KERNEL(const T *x, const T *delta, const T *w, const T *bias,    \
                                                             T *sum, T *y, float *mean, float *rstd, int d,            \
                                                             float eps, float one) {                                   \
        let_next_begin();                                                                                              \
        wait_for_those_before();                                                                                       \
        BODY(x, delta, w, bias, sum, y, mean, rstd, d, eps, one);                                                      \
    }
#define NORM(T, NAME, CHUNKS)                                                                                          \
    NORM_ONE(T, rms_norm_##NAME##_##CHUNKS, (norm_row<T, CHUNKS, false, false>))                                       \
    NORM_ONE(T, add_rms_norm_##NAME##_##CHUNKS, (norm_row<T, CHUNKS, true, false>))                                    \
    NORM_ONE(T, layer_norm_##NAME##_##CHUNKS, (norm_row<T, CHUNKS, false, true>))                                      \
    NORM_ONE(T, add_layer_norm_##NAME##_##CHUNKS, (norm_row<T, CHUNKS, true, true>))
#define NORM_ANY(T, NAME)                                                                                              \
    NORM_ONE(T, rms_norm_##NAME##_any, (norm_any<T, false, false>))                                                    \
    NORM_ONE(T, add_rms_norm_##NAME##_any, (norm_any<T, true, false>))                                                 \
    NORM_ONE(T, layer_norm_##NAME##_any, (norm_any<T, false, true>))                                                   \
    NORM_ONE(T, add_layer_norm_##NAME##_any, (norm_any<T, true, true>))
NORM(float, f32, 1)
NORM(float, f32, 2)
NORM(float, f32, 4)
NORM(bf16, bf16, 1)
NORM(bf16, bf16, 2)
NORM(bf16, bf16, 4)
NORM(f16, f16, 1)
NORM(f16, f16, 2)
NORM(f16, f16, 4)
NORM_ANY(float, f32)
NORM_ANY(bf16, bf16)
NORM_ANY(f16, f16)

// Sums of N numbers over a warp, N a power of 2: lanes hand over half of what they have at each step, so that lane l has the sum
// of number l / (32 / N) at the end, in v[0].
template <int N>
static __device__ __forceinline__ void warp_sums(float (&v)[N], int lane) {
    int step = 16;
#pragma unroll
    for (int n = N; n > 1; n >>= 1, step >>= 1) {
        bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            float keep = upper ? v[i + n / 2] : v[i], give = upper ? v[i] : v[i + n / 2];
            v[i] = keep + __shfl_xor_sync(~0u, give, step);
        }
    }
#pragma unroll
    for (; step; step >>= 1) v[0] += __shfl_xor_sync(~0u, v[0], step);
}

// The sums of N numbers of every thread, on every thread. Callers take turns between two places, so that one barrier does: who is
// a turn ahead writes elsewhere. Places of warps that are not there hold zeros.
template <int N>
static __device__ __forceinline__ void block_sums(float (&v)[N], float (*shared)[8]) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    warp_sums(v, lane);
    if (lane % (32 / N) == 0) shared[lane / (32 / N)][warp] = v[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        float4 a = *(float4 *)&shared[i][0], b = *(float4 *)&shared[i][4];
        v[i] = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    }
}

// Gradients: dx (plus what reaches the sum on the residual path), and per block of threads a share of the gradients of the weight,
// of the bias, and of a bias whose gradient is the sum of dx. Any may be null.
// A block takes ROWS rows at a time, with one barrier for all of them: their loads are on their way together. Rows stay packed:
// registers are what limits how many there can be.
template <typename T, int CHUNKS, int ROWS, bool MEAN>
static __device__ __forceinline__ void grad_rows(const T *dy, const T *x, const T *w, const float *mean, const float *rstd,
                                                 const T *dsum, T *dx, float *shares, float *bias_shares,
                                                 float *dx_shares, i64 rows, int d, float one) {
    const int N = Pack<T>::N, SUMS = MEAN ? 2 * ROWS : ROWS;
    __shared__ alignas(16) float sums[2][SUMS][8];
    for (int i = threadIdx.x; i < 2 * SUMS * 8; i += blockDim.x) (&sums[0][0][0])[i] = 0.0f;
    __syncthreads();
    Pack<T> weight[CHUNKS] = {};
    float dw[CHUNKS][N] = {}, db[MEAN ? CHUNKS : 1][N] = {}, dsums[CHUNKS][N] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = (c * blockDim.x + threadIdx.x) * N;
        if (i < d && dx) weight[c] = *(const Pack<T> *)(w + i);
    }
    int turn = 0;
    float inverse = 1.0f / d;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        // Rows that are not there, and columns, are zeros.
        Pack<T> g[ROWS][CHUNKS] = {}, v[ROWS][CHUNKS] = {}, more[ROWS][CHUNKS] = {};
        float r[ROWS] = {}, shift[ROWS] = {}, part[SUMS] = {};
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            i64 row = first + k;
            if (row >= rows) continue;
            r[k] = rstd[row];
            if (MEAN) shift[k] = mean[row];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int i = (c * blockDim.x + threadIdx.x) * N;
                if (i >= d) continue;
                g[k][c] = *(const Pack<T> *)(dy + row * d + i);
                v[k][c] = *(const Pack<T> *)(x + row * d + i);
                if (dsum) more[k][c] = *(const Pack<T> *)(dsum + row * d + i);
            }
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                float dy[N], normed[N], scale[N];
                unpack(g[k][c], dy);
                unpack(v[k][c], normed);
                unpack(weight[c], scale);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    normed[j] = (normed[j] - shift[k]) * r[k];
                    dw[c][j] += dy[j] * normed[j];
                    if (MEAN) db[c][j] += dy[j];
                    dy[j] *= scale[j] + one;
                    part[k] += dy[j] * normed[j];
                    if (MEAN) part[ROWS + k] += dy[j];
                }
            }
        }
        if (!dx) continue;
        block_sums<SUMS>(part, sums[turn]);
        turn ^= 1;
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            i64 row = first + k;
            if (row >= rows) continue;
            float dot = part[k] * inverse * r[k], total = MEAN ? part[ROWS + k] * inverse * r[k] : 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int i = (c * blockDim.x + threadIdx.x) * N;
                if (i >= d) continue;
                float dy[N], normed[N], scale[N], out[N];
                unpack(g[k][c], dy);
                unpack(v[k][c], normed);
                unpack(weight[c], scale);
                unpack(more[k][c], out);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    normed[j] = (normed[j] - shift[k]) * r[k];
                    out[j] = dy[j] * (scale[j] + one) * r[k] - normed[j] * dot + (out[j] - total);
                }
                Pack<T> packed;
                pack(out, packed);
                *(Pack<T> *)(dx + row * d + i) = packed;
                // The gradient of that bias is of what is stored.
                unpack(packed, out);
#pragma unroll
                for (int j = 0; j < N; j++) dsums[c][j] += out[j];
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = (c * blockDim.x + threadIdx.x) * N;
        if (i >= d) continue;
        i64 at = (i64)blockIdx.x * d + i;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (shares) shares[at + j] = dw[c][j];
            if (MEAN && bias_shares) bias_shares[at + j] = db[c][j];
            if (dx_shares) dx_shares[at + j] = dsums[c][j];
        }
    }
}

template <typename T, bool MEAN>
static __device__ __forceinline__ void grad_any(const T *dy, const T *x, const T *w, const float *mean, const float *rstd, const T *dsum,
                                T *dx, float *shares, float *bias_shares, float *dx_shares, i64 rows, int d, float one) {
    __shared__ float shared[32], other[32];
    if (shares) {
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float dw = 0.0f, db = 0.0f;
            for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
                float g = to_f32(dy[row * d + i]);
                dw += g * (to_f32(x[row * d + i]) - (MEAN ? mean[row] : 0.0f)) * rstd[row];
                db += g;
            }
            shares[(i64)blockIdx.x * d + i] = dw;
            if (bias_shares) bias_shares[(i64)blockIdx.x * d + i] = db;
        }
    }
    if (!dx) return;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float r = rstd[row], m = MEAN ? mean[row] : 0.0f, dot = 0.0f, total = 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float g = (to_f32(w[i]) + one) * to_f32(dy[row * d + i]);
            dot += g * (to_f32(x[row * d + i]) - m) * r;
            total += g;
        }
        dot = block_sum(dot, shared) / d;
        total = MEAN ? block_sum(total, other) / d : 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float g = (to_f32(w[i]) + one) * to_f32(dy[row * d + i]);
            float out = r * (g - total - (to_f32(x[row * d + i]) - m) * r * dot);
            if (dsum) out += to_f32(dsum[row * d + i]);
            dx[row * d + i] = Of<T>::f32(out);
        }
    }
    if (!dx_shares) return;
    // A thread adds up what it has written itself.
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0.0f;
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) sum += to_f32(dx[row * d + i]);
        dx_shares[(i64)blockIdx.x * d + i] = sum;
    }
}

#define GRAD_ONE(T, KERNEL, BLOCKS, BODY)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                          \
        KERNEL(const T *dy, const T *x, const T *w, const float *mean, const float *rstd, const T *dsum, T *dx,        \
               float *shares, float *bias_shares, float *dx_shares, i64 rows, int d, float one) {                      \
        BODY(dy, x, w, mean, rstd, dsum, dx, shares, bias_shares, dx_shares, rows, d, one);                            \
    }
#define GRAD(T, NAME, CHUNKS, ROWS, BLOCKS)                                                                            \
    GRAD_ONE(T, rms_norm_grad_##NAME##_##CHUNKS, BLOCKS, (grad_rows<T, CHUNKS, ROWS, false>))                          \
    GRAD_ONE(T, layer_norm_grad_##NAME##_##CHUNKS, BLOCKS, (grad_rows<T, CHUNKS, ROWS, true>))
#define GRAD_ANY(T, NAME)                                                                                              \
    GRAD_ONE(T, rms_norm_grad_##NAME##_any, 1, (grad_any<T, false>))                                                   \
    GRAD_ONE(T, layer_norm_grad_##NAME##_any, 1, (grad_any<T, true>))
// Rows at a time and blocks of a multiprocessor: as the host counts.
GRAD(float, f32, 1, 2, 3)
GRAD(float, f32, 2, 1, 2)
GRAD(float, f32, 4, 1, 1)
GRAD(bf16, bf16, 1, 2, 3)
GRAD(bf16, bf16, 2, 1, 2)
GRAD(bf16, bf16, 4, 1, 1)
GRAD(f16, f16, 1, 2, 3)
GRAD(f16, f16, 2, 1, 2)
GRAD(f16, f16, 4, 1, 1)
GRAD_ANY(float, f32)
GRAD_ANY(bf16, bf16)
GRAD_ANY(f16, f16)

// Norms of a part of the features: a block has a row, and what is summed over all features comes from outside.
template <typename T>
static __device__ void row_dot(const T *a, const T *b, const T *w, float *dot, int d, float one) {
    __shared__ float shared[32];
    i64 row = blockIdx.x;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        sum += to_f32(a[row * d + i]) * to_f32(b[row * d + i]) * (w ? to_f32(w[i]) + one : 1.0f);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) dot[row] = sum;
}

template <typename T>
static __device__ void norm_by(const T *x, const T *w, const float *squares, T *y, float *rstd, int d, float width,
                               float eps, float one) {
    i64 row = blockIdx.x;
    float r = rsqrtf(squares[row] / width + eps);
    if (rstd && threadIdx.x == 0) rstd[row] = r;
    if (!y) return;
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        y[row * d + i] = Of<T>::f32(to_f32(x[row * d + i]) * r * (to_f32(w[i]) + one));
}

template <typename T>
static __device__ void norm_by_grad(const T *dy, const T *x, const T *w, const float *rstd, const float *dot, T *dx, int d,
                                    float width, float one) {
    i64 row = blockIdx.x;
    float r = rstd[row], shrink = dot[row] * r * r * r / width;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        i64 at = row * d + i;
        dx[at] = Of<T>::f32(r * (to_f32(w[i]) + one) * to_f32(dy[at]) - to_f32(x[at]) * shrink);
    }
}

#define NORM_BY(T, NAME)                                                                                               \
    extern "C" __global__ void row_dot_##NAME(const T *a, const T *b, const T *w, float *dot, int d, float one) {      \
        row_dot<T>(a, b, w, dot, d, one);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void norm_by_##NAME(const T *x, const T *w, const float *squares, T *y, float *rstd, int d,  \
                                              float width, float eps, float one) {                                     \
        norm_by<T>(x, w, squares, y, rstd, d, width, eps, one);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void norm_by_grad_##NAME(const T *dy, const T *x, const T *w, const float *rstd,             \
                                                   const float *dot, T *dx, int d, float width, float one) {           \
        norm_by_grad<T>(dy, x, w, rstd, dot, dx, d, width, one);                                                       \
    }
NORM_BY(float, f32)
NORM_BY(bf16, bf16)
NORM_BY(f16, f16)

// Norms of the heads of packed Q·K·V: a warp per position and head. `w` has e numbers for Q heads, then e for K heads. V is
// copied where y is apart.
template <typename T>
static __device__ void head_norm(const T *qkv, const T *w, T *y, float *rstd, i64 rows, int q, int u, int e, float eps,
                                 float one) {
    i64 at = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31, heads = q + 2 * u;
    i64 row = at / heads;
    int h = at % heads;
    if (row >= rows) return;
    const T *x = qkv + at * e;
    T *out = y ? y + at * e : 0;
    if (h >= q + u) {
        if (out && out != x)
            for (int i = lane; i < e; i += 32) out[i] = x[i];
        return;
    }
    float squares = 0.0f;
    for (int i = lane; i < e; i += 32) squares += to_f32(x[i]) * to_f32(x[i]);
    float r = rsqrtf(warp_sum(squares) / e + eps);
    if (rstd && lane == 0) rstd[row * (q + u) + h] = r;
    if (!out) return;
    if (h >= q) w += e;
    for (int i = lane; i < e; i += 32) out[i] = Of<T>::f32(to_f32(x[i]) * r * (to_f32(w[i]) + one));
}

template <typename T>
static __device__ void head_norm_grad(const T *dy, const T *qkv, const T *w, const float *rstd, T *dqkv, i64 rows, int q,
                                      int u, int e, float one) {
    i64 at = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31, heads = q + 2 * u;
    i64 row = at / heads;
    int h = at % heads;
    if (row >= rows) return;
    const T *g = dy + at * e, *x = qkv + at * e;
    T *out = dqkv + at * e;
    if (h >= q + u) {
        if (out != g)
            for (int i = lane; i < e; i += 32) out[i] = g[i];
        return;
    }
    if (h >= q) w += e;
    float r = rstd[row * (q + u) + h], dot = 0.0f;
    for (int i = lane; i < e; i += 32) dot += to_f32(g[i]) * (to_f32(w[i]) + one) * to_f32(x[i]) * r;
    dot = warp_sum(dot) / e;
    for (int i = lane; i < e; i += 32)
        out[i] = Of<T>::f32(r * (to_f32(g[i]) * (to_f32(w[i]) + one) - to_f32(x[i]) * r * dot));
}

// Shares of the weights' gradient: a block takes rows blockIdx.x, … and has a thread per number of the weight.
template <typename T>
static __device__ void head_norm_grad_weight(const T *dy, const T *qkv, const float *rstd, float *shares, i64 rows,
                                             int q, int u, int e) {
    for (int i = threadIdx.x; i < 2 * e; i += blockDim.x) {
        int from = i < e ? 0 : q, to = i < e ? q : q + u, column = i < e ? i : i - e;
        float sum = 0.0f;
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x)
            for (int h = from; h < to; h++) {
                i64 at = (row * (q + 2 * u) + h) * e + column;
                sum += to_f32(dy[at]) * to_f32(qkv[at]) * rstd[row * (q + u) + h];
            }
        shares[(i64)blockIdx.x * 2 * e + i] = sum;
    }
}

#define HEAD_NORM(T, NAME)                                                                                             \
    extern "C" __global__ void qk_norm_##NAME(const T *qkv, const T *w, T *y, float *rstd, i64 rows, int q, int u,     \
                                              int e, float eps, float one) {                                           \
        head_norm<T>(qkv, w, y, rstd, rows, q, u, e, eps, one);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void qk_norm_grad_##NAME(const T *dy, const T *qkv, const T *w, const float *rstd, T *dqkv,  \
                                                   i64 rows, int q, int u, int e, float one) {                         \
        head_norm_grad<T>(dy, qkv, w, rstd, dqkv, rows, q, u, e, one);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void qk_norm_grad_weight_##NAME(const T *dy, const T *qkv, const float *rstd, float *shares, \
                                                          i64 rows, int q, int u, int e) {                             \
        head_norm_grad_weight<T>(dy, qkv, rstd, shares, rows, q, u, e);                                                \
    }
HEAD_NORM(float, f32)
HEAD_NORM(bf16, bf16)
HEAD_NORM(f16, f16)
