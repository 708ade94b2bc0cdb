// Biases, GELU, GeGLU, factors, learned positions, dropout, initial values.

// y = x + bias.
template <typename T>
static __device__ void add_bias(const T *x, const T *bias, T *y, int d, int wide) {
    i64 row = blockIdx.y;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (wide) {
        const int N = Pack<T>::N;
        i *= N;
        if (i >= d) return;
        float a[N], b[N];
        load(x + row * d + i, a);
        load(bias + i, b);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] += b[j];
        store(y + row * d + i, a);
    } else if (i < d) {
        y[row * d + i] = Of<T>::f32(to_f32(x[row * d + i]) + to_f32(bias[i]));
    }
}

const float ROOT_2_OVER_PI = 0.7978845608028654f;

// 0.5 · (1 + tanh(u)) is 1 / (1 + e^(−2u)): one exponential, one reciprocal.
static __device__ __forceinline__ float gelu_share(float x) {
    float e = __expf(-2.0f * ROOT_2_OVER_PI * (x + 0.044715f * x * x * x));
    return __fdividef(1.0f, 1.0f + e);
}

static __device__ __forceinline__ float gelu_one(float x) { return x * gelu_share(x); }

static __device__ __forceinline__ float gelu_derivative(float x) {
    float s = gelu_share(x);
    return s + 2.0f * ROOT_2_OVER_PI * x * s * (1.0f - s) * (1.0f + 0.134145f * x * x);
}

// Warps of a block of `column_sums`.
const int SUM_WARPS = 8;

// Shares of Σ over rows of dy, or of dx = dy · gelu'(x), which is stored. A block has a line of 32 packs of columns (of columns,
// where rows are not whole packs); its warps have rows blockIdx.y · warps + warp, on by as many as all blocks of the line have.
template <typename T, int N, bool GELU>
static __device__ __forceinline__ void column_sums(const T *dy, const T *x, T *dx, float *shares, i64 rows, int d) {
    // Rows on their way together.
    const int TOGETHER = GELU ? 2 : 4;
    __shared__ float part[SUM_WARPS][N][33];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int column = (blockIdx.x * 32 + lane) * N;
    i64 step = (i64)gridDim.y * SUM_WARPS;
    float sum[N] = {};
    if (column < d) {
        for (i64 first = (i64)blockIdx.y * SUM_WARPS + warp; first < rows; first += step * TOGETHER) {
            float g[TOGETHER][N], v[TOGETHER][N];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                i64 row = first + k * step, at = row * d + column;
#pragma unroll
                for (int j = 0; j < N; j++) g[k][j] = v[k][j] = 0.0f;
                if (row >= rows) continue;
                if (N > 1) {
                    load(dy + at, g[k]);
                    if (GELU) load(x + at, v[k]);
                } else {
                    g[k][0] = to_f32(dy[at]);
                    if (GELU) v[k][0] = to_f32(x[at]);
                }
            }
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                i64 row = first + k * step, at = row * d + column;
                if (GELU) {
                    if (row >= rows) continue;
#pragma unroll
                    for (int j = 0; j < N; j++) g[k][j] *= gelu_derivative(v[k][j]);
                    // The sum is of what is stored.
                    if (N > 1) {
                        Pack<T> packed;
                        pack(g[k], packed);
                        *(Pack<T> *)(dx + at) = packed;
                        unpack(packed, g[k]);
                    } else {
                        dx[at] = Of<T>::f32(g[k][0]);
                        g[k][0] = to_f32(dx[at]);
                    }
                }
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += g[k][j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) part[warp][j][lane] = sum[j];
    __syncthreads();
    // A thread adds up a column.
    int c = threadIdx.x;
    column = blockIdx.x * 32 * N + c;
    if (c >= 32 * N || column >= d) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++) total += part[w][c % N][c / N];
    shares[(i64)blockIdx.y * d + column] = total;
}

template <typename T>
static __device__ void gelu(const T *x, T *y, i64 n) {
    const int N = Pack<T>::N;
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        float v[N];
        load(x + i, v);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = gelu_one(v[j]);
        store(y + i, v);
    } else {
        for (; i < n; i++) y[i] = Of<T>::f32(gelu_one(to_f32(x[i])));
    }
}

template <typename T>
static __device__ void gelu_grad(const T *dy, const T *x, T *dx, i64 n) {
    const int N = Pack<T>::N;
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        float v[N], g[N];
        load(x + i, v);
        load(dy + i, g);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = g[j] * gelu_derivative(v[j]);
        store(dx + i, v);
    } else {
        for (; i < n; i++) dx[i] = Of<T>::f32(to_f32(dy[i]) * gelu_derivative(to_f32(x[i])));
    }
}

// y = gelu(gate) · up. A block has a part of a row.
template <typename T>
static __device__ void geglu(const T *gate_up, T *y, int f, int wide) {
    i64 row = blockIdx.y;
    gate_up += row * 2 * f;
    y += row * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i >= f) return;
        float g[N], u[N];
        load(gate_up + i, g);
        load(gate_up + f + i, u);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = gelu_one(g[j]) * u[j];
        store(y + i, g);
    } else if (i < f) {
        y[i] = Of<T>::f32(gelu_one(to_f32(gate_up[i])) * to_f32(gate_up[f + i]));
    }
}

// May work in place.
template <typename T>
static __device__ void geglu_grad(const T *dy, const T *gate_up, T *out, int f, int wide) {
    i64 row = blockIdx.y;
    dy += row * f;
    gate_up += row * 2 * f;
    out += row * 2 * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i >= f) return;
        float g[N], u[N], d[N];
        load(gate_up + i, g);
        load(gate_up + f + i, u);
        load(dy + i, d);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float gate = g[j];
            g[j] = d[j] * u[j] * gelu_derivative(gate);
            u[j] = d[j] * gelu_one(gate);
        }
        store(out + i, g);
        store(out + f + i, u);
    } else if (i < f) {
        float g = to_f32(gate_up[i]), u = to_f32(gate_up[f + i]), d = to_f32(dy[i]);
        out[i] = Of<T>::f32(d * u * gelu_derivative(g));
        out[f + i] = Of<T>::f32(d * gelu_one(g));
    }
}

// What the gate is multiplied by in the sigmoid of a clamped SwiGLU.
const float QUICK = 1.702f;

static __device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

static __device__ __forceinline__ float clamped_one(float g, float u, float limit) {
    g = at_most(g, limit), u = -at_most(-at_most(u, limit), limit);
    return (u + 1.0f) * g / (1.0f + __expf(-QUICK * g));
}

// Gradients by gate and up, in their places: zero in what is clamped.
static __device__ __forceinline__ void clamped_grads(float d, float &gate, float &up, float limit) {
    float g = at_most(gate, limit), u = -at_most(-at_most(up, limit), limit);
    float s = 1.0f / (1.0f + __expf(-QUICK * g));
    gate = gate > limit ? 0.0f : d * (u + 1.0f) * s * (1.0f + QUICK * g * (1.0f - s));
    up = up > limit || up < -limit ? 0.0f : d * g * s;
}

// y = (up + 1) · gate · σ(1.702 · gate) of clamped gate and up. A block has a part of a row.
template <typename T>
static __device__ void clamped_swiglu(const T *gate_up, T *y, int f, int wide, float limit) {
    i64 row = blockIdx.y;
    gate_up += row * 2 * f;
    y += row * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i >= f) return;
        float g[N], u[N];
        load(gate_up + i, g);
        load(gate_up + f + i, u);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = clamped_one(g[j], u[j], limit);
        store(y + i, g);
    } else if (i < f) {
        y[i] = Of<T>::f32(clamped_one(to_f32(gate_up[i]), to_f32(gate_up[f + i]), limit));
    }
}

// May work in place.
template <typename T>
static __device__ void clamped_swiglu_grad(const T *dy, const T *gate_up, T *out, int f, int wide, float limit) {
    i64 row = blockIdx.y;
    dy += row * f;
    gate_up += row * 2 * f;
    out += row * 2 * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i >= f) return;
        float g[N], u[N], d[N];
        load(gate_up + i, g);
        load(gate_up + f + i, u);
        load(dy + i, d);
#pragma unroll
        for (int j = 0; j < N; j++) clamped_grads(d[j], g[j], u[j], limit);
        store(out + i, g);
        store(out + f + i, u);
    } else if (i < f) {
        float g = to_f32(gate_up[i]), u = to_f32(gate_up[f + i]);
        clamped_grads(to_f32(dy[i]), g, u, limit);
        out[i] = Of<T>::f32(g);
        out[f + i] = Of<T>::f32(u);
    }
}

// y = factor · x, by the factor as T rounds it where `rounded` says so.
template <typename T>
static __device__ void scale(const T *x, T *y, i64 n, float factor, int rounded) {
    const int N = Pack<T>::N;
    if (rounded) factor = to_f32(Of<T>::f32(factor));
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        float v[N];
        load(x + i, v);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] *= factor;
        store(y + i, v);
    } else {
        for (; i < n; i++) y[i] = Of<T>::f32(factor * to_f32(x[i]));
    }
}

// The row of the table of a position. `how`: 0 its place in the sequence, 1 from starts[sequence] on, 2 from the start of its
// document, by starts of the whole sequence, of which `span` is this rank's part.
static __device__ __forceinline__ i64 place_of(i64 row, int seq, int whole, Span span, const u32 *starts, int how,
                                               int rows) {
    i64 b = row / seq, s = span.entry((int)(row % seq));
    if (how == 1) s += starts[b];
    if (how == 2) {
        i64 start = starts[b * whole + s];
        s = start > s ? 0 : s - start;
    }
    return s < rows ? s : rows - 1;
}

template <typename T>
static __device__ void add_positions(const T *x, const T *table, const u32 *starts, T *y, int d, int seq, int whole,
                                     Span span, int how, int rows) {
    i64 row = blockIdx.x;
    i64 place = place_of(row, seq, whole, span, starts, how, rows);
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        y[row * d + i] = Of<T>::f32(to_f32(x[row * d + i]) + to_f32(table[place * d + i]));
}

// One block per row of the table: adds up the positions that used it, in order.
template <typename T>
static __device__ void positions_grad(const T *dx, const u32 *starts, void *out, int kind, int add, int d, int batch,
                                      int seq, int whole, Span span, int how, int rows) {
    i64 place = blockIdx.x;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0.0f;
        i64 fixed = kind == SUM_FIXED && add ? ((i64 *)out)[place * d + i] : 0;
        for (int b = 0; b < batch; b++) {
            int here = how == 2 ? -1 : span.at((int)place, seq);
            int from = how == 2 ? 0 : here < 0 ? seq : here, to = how == 2 ? seq : from + 1;
            for (int s = from; s < to && s < seq; s++) {
                i64 row = (i64)b * seq + s;
                if (place_of(row, seq, whole, span, starts, how, rows) != place) continue;
                float x = to_f32(dx[row * d + i]);
                if (kind == SUM_FIXED)
                    fixed = fixed_merge(fixed, fixed_of(x));
                else
                    sum += x;
            }
        }
        if (kind == SUM_FIXED)
            ((i64 *)out)[place * d + i] = fixed;
        else
            sum_write(out, kind, place * d + i, sum, add);
    }
}

// The mask is a function of the sequence's key, the site, position and feature.
template <typename T>
static __device__ void dropout(const T *x, const u32 *keys, T *y, int d, int feature, int seq, Span span, u64 site, u32 below,
                               float scale) {
    i64 row = blockIdx.x;
    i64 b = row / seq, s = span.entry((int)(row % seq));
    u64 key = (u64)keys[2 * b] | (u64)keys[2 * b + 1] << 32;
    u64 mask = hash_bits(hash_bits(key, site), (u64)s);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        u32 z = row_bits(mask, (u32)(feature + i));
        y[row * d + i] = z < below ? Of<T>::f32(0.0f) : Of<T>::f32(to_f32(x[row * d + i]) * scale);
    }
}

// Twelve 21-bit uniforms, centred: exact in integers, so the bits are the host's.
static __device__ __forceinline__ float normal(u64 key, u64 counter) {
    const u64 MASK = (1 << 21) - 1;
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u64 b = hash_bits(key, counter * 4 + i);
        sum += (b & MASK) + ((b >> 21) & MASK) + ((b >> 42) & MASK);
    }
    return __ll2float_rn((i64)sum - 6 * (i64)MASK) * (1.0f / (1 << 21));
}

// Initial values: normal ones, or ones, times a number.
template <typename T>
static __device__ void initial(T *out, u64 key, float scale, int drawn, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = Of<T>::f32((drawn ? normal(key, i) : 1.0f) * scale);
}

#define ELEMENTS(T, NAME)                                                                                              \
    extern "C" __global__ void add_bias_##NAME(const T *x, const T *bias, T *y, int d, int wide) {                     \
        add_bias<T>(x, bias, y, d, wide);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)                                                       \
        bias_grad_##NAME(const T *dy, float *shares, i64 rows, int d, int wide) {                                      \
        if (wide)                                                                                                      \
            column_sums<T, Pack<T>::N, false>(dy, 0, 0, shares, rows, d);                                              \
        else                                                                                                           \
            column_sums<T, 1, false>(dy, 0, 0, shares, rows, d);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)                                                       \
        gelu_bias_grad_##NAME(const T *dy, const T *x, T *dx, float *shares, i64 rows, int d, int wide) {              \
        if (wide)                                                                                                      \
            column_sums<T, Pack<T>::N, true>(dy, x, dx, shares, rows, d);                                              \
        else                                                                                                           \
            column_sums<T, 1, true>(dy, x, dx, shares, rows, d);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void gelu_##NAME(const T *x, T *y, i64 n) { gelu<T>(x, y, n); }                              \
    extern "C" __global__ void gelu_grad_##NAME(const T *dy, const T *x, T *dx, i64 n) { gelu_grad<T>(dy, x, dx, n); } \
    extern "C" __global__ void geglu_##NAME(const T *gate_up, T *y, int f, int wide) { geglu<T>(gate_up, y, f, wide); }  \
    extern "C" __global__ void geglu_grad_##NAME(const T *dy, const T *gate_up, T *out, int f, int wide) {             \
        geglu_grad<T>(dy, gate_up, out, f, wide);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void clamped_swiglu_##NAME(const T *gate_up, T *y, int f, int wide, float limit) {           \
        clamped_swiglu<T>(gate_up, y, f, wide, limit);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void clamped_swiglu_grad_##NAME(const T *dy, const T *gate_up, T *out, int f, int wide,      \
                                                          float limit) {                                               \
        clamped_swiglu_grad<T>(dy, gate_up, out, f, wide, limit);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void scale_##NAME(const T *x, T *y, i64 n, float factor, int rounded) {                      \
        scale<T>(x, y, n, factor, rounded);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void add_positions_##NAME(const T *x, const T *table, const u32 *starts, T *y, int d,        \
                                                    int seq, int whole, int first, int count, int then, int how,       \
                                                    int rows) {                                                        \
        add_positions<T>(x, table, starts, y, d, seq, whole, {first, count, then}, how, rows);                         \
    }                                                                                                                  \
    extern "C" __global__ void positions_grad_##NAME(const T *dx, const u32 *starts, void *out, int kind, int add,     \
                                                     int d, int batch, int seq, int whole, int first, int count,       \
                                                     int then, int how, int rows) {                                    \
        positions_grad<T>(dx, starts, out, kind, add, d, batch, seq, whole, {first, count, then}, how, rows);          \
    }                                                                                                                  \
    extern "C" __global__ void initial_##NAME(T *out, u64 key, float scale, int drawn, i64 n) {                        \
        initial<T>(out, key, scale, drawn, n);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void dropout_##NAME(const T *x, const u32 *keys, T *y, int d, int feature, int seq, int first, int count, \
                                              int then, u64 site, u32 below, float scale) {                            \
        dropout<T>(x, keys, y, d, feature, seq, {first, count, then}, site, below, scale);                                      \
    }
ELEMENTS(float, f32)
ELEMENTS(bf16, bf16)
ELEMENTS(f16, f16)
