// Attention whose weights exist as a matrix [b, heads, s, s]: for looking at its memory, not for speed. One warp per row; a lane
// has elements lane, lane + 32, … of a head.

const int PER_LANE = 8;

struct Shape {
    // Elements of a head of Q and K, and of V.
    int seq, heads, kv_heads, e, v, width;

    // Where a value head starts in a row.
    __device__ __forceinline__ int value(int u) const { return (heads + kv_heads) * e + u * v; }
};

template <typename T>
static __device__ __forceinline__ void read_head(const T *x, int e, float *out) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < PER_LANE; c++) out[c] = c * 32 + lane < e ? to_f32(x[c * 32 + lane]) : 0.0f;
}

template <typename T>
static __device__ __forceinline__ void write_head(T *to, int e, const float *x) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < PER_LANE; c++)
        if (c * 32 + lane < e) to[c * 32 + lane] = Of<T>::f32(x[c]);
}

static __device__ __forceinline__ float dot(const float *a, const float *b) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < PER_LANE; c++) sum += a[c] * b[c];
    return warp_sum(sum);
}

// The position and whether it exists. Grid: (positions ÷ warps, heads, batch).
#define POSITION(g)                                                                                                    \
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y, lane = threadIdx.x & 31;              \
    i64 b = blockIdx.z;                                                                                                \
    if (s >= g.seq) return

template <typename T>
static __device__ void scores(const T *qkv, const u32 *starts, T *p, Shape g, int window, float scale) {
    POSITION(g);
    int first = s - window + 1 > 0 ? s - window + 1 : 0;
    if (starts) {
        u32 start = starts[b * g.seq + s];
        int given = start > (u32)s ? s : (int)start;
        first = given > first ? given : first;
    }
    const T *base = qkv + b * g.seq * g.width;
    const T *keys = base + (g.heads + h / (g.heads / g.kv_heads)) * g.e;
    T *row = p + ((b * g.heads + h) * g.seq + s) * g.seq;
    float q[PER_LANE], k[PER_LANE];
    read_head(base + (i64)s * g.width + h * g.e, g.e, q);
    float max = NEGATIVE_INFINITY, sum = 0.0f;
    for (int t = first; t <= s; t++) {
        read_head(keys + (i64)t * g.width, g.e, k);
        float score = dot(q, k) * scale;
        if (score > max) {
            sum *= __expf(max - score);
            max = score;
        }
        sum += __expf(score - max);
    }
    for (int t = 0; t < g.seq; t++) {
        float weight = 0.0f;
        if (t >= first && t <= s) {
            read_head(keys + (i64)t * g.width, g.e, k);
            weight = __expf(dot(q, k) * scale - max) / sum;
        }
        if (lane == 0) row[t] = Of<T>::f32(weight);
    }
}

template <typename T>
static __device__ void mix(const T *p, const T *qkv, T *o, Shape g) {
    POSITION(g);
    (void)lane;
    const T *values = qkv + b * g.seq * g.width + g.value(h / (g.heads / g.kv_heads));
    const T *row = p + ((b * g.heads + h) * g.seq + s) * g.seq;
    float out[PER_LANE] = {}, v[PER_LANE];
    for (int t = 0; t <= s; t++) {
        float weight = to_f32(row[t]);
        read_head(values + (i64)t * g.width, g.v, v);
#pragma unroll
        for (int c = 0; c < PER_LANE; c++) out[c] += weight * v[c];
    }
    write_head(o + ((b * g.seq + s) * g.heads + h) * g.v, g.v, out);
}

// dp = do · v.
template <typename T>
static __device__ void mix_grad_weights(const T *dout, const T *qkv, T *dp, Shape g) {
    POSITION(g);
    const T *values = qkv + b * g.seq * g.width + g.value(h / (g.heads / g.kv_heads));
    float d[PER_LANE], v[PER_LANE];
    read_head(dout + ((b * g.seq + s) * g.heads + h) * g.v, g.v, d);
    for (int t = 0; t < g.seq; t++) {
        read_head(values + (i64)t * g.width, g.v, v);
        float x = dot(d, v);
        if (lane == 0) dp[((b * g.heads + h) * g.seq + s) * g.seq + t] = Of<T>::f32(x);
    }
}

// The V section of dqkv, and zeros in the others. `h` counts value heads here.
template <typename T>
static __device__ void mix_grad_values(const T *dout, const T *p, T *dqkv, Shape g) {
    POSITION(g);
    int t = s, group = g.heads / g.kv_heads;
    float dv[PER_LANE] = {}, d[PER_LANE];
    for (int q = h * group; q < (h + 1) * group; q++)
        for (int row = 0; row < g.seq; row++) {
            float weight = to_f32(p[((b * g.heads + q) * g.seq + row) * g.seq + t]);
            read_head(dout + ((b * g.seq + row) * g.heads + q) * g.v, g.v, d);
#pragma unroll
            for (int c = 0; c < PER_LANE; c++) dv[c] += weight * d[c];
        }
    T *out = dqkv + (b * g.seq + t) * g.width;
    write_head(out + g.value(h), g.v, dv);
    int zeros = (g.heads + g.kv_heads) * g.e;
    for (int i = h * 32 + lane; i < zeros; i += 32 * g.kv_heads) out[i] = Of<T>::f32(0.0f);
}

// Of every row of weights Σ p · dp.
template <typename T>
static __device__ void row_means(const T *dp, const T *p, float *means, Shape g) {
    POSITION(g);
    i64 at = (b * g.heads + h) * g.seq + s;
    float sum = 0.0f;
    for (int t = lane; t < g.seq; t += 32) sum += to_f32(dp[at * g.seq + t]) * to_f32(p[at * g.seq + t]);
    sum = warp_sum(sum);
    if (lane == 0) means[at] = sum;
}

template <typename T>
static __device__ void scores_grad_query(const T *dp, const T *p, const T *qkv, const float *means, T *dqkv, Shape g,
                                         float scale) {
    POSITION(g);
    (void)lane;
    const T *keys = qkv + b * g.seq * g.width + (g.heads + h / (g.heads / g.kv_heads)) * g.e;
    i64 at = (b * g.heads + h) * g.seq + s;
    float dq[PER_LANE] = {}, k[PER_LANE];
    for (int t = 0; t < g.seq; t++) {
        float ds = to_f32(p[at * g.seq + t]) * (to_f32(dp[at * g.seq + t]) - means[at]) * scale;
        read_head(keys + (i64)t * g.width, g.e, k);
#pragma unroll
        for (int c = 0; c < PER_LANE; c++) dq[c] += ds * k[c];
    }
    write_head(dqkv + (b * g.seq + s) * g.width + h * g.e, g.e, dq);
}

// The K section of dqkv, and zeros in V. `h` counts key heads here.
template <typename T>
static __device__ void scores_grad_key(const T *dp, const T *p, const T *qkv, const float *means, T *dqkv, Shape g,
                                       float scale) {
    POSITION(g);
    (void)lane;
    int t = s, group = g.heads / g.kv_heads;
    float dk[PER_LANE] = {}, q[PER_LANE], zero[PER_LANE] = {};
    for (int head = h * group; head < (h + 1) * group; head++)
        for (int row = 0; row < g.seq; row++) {
            i64 at = (b * g.heads + head) * g.seq + row;
            float ds = to_f32(p[at * g.seq + t]) * (to_f32(dp[at * g.seq + t]) - means[at]) * scale;
            read_head(qkv + (b * g.seq + row) * g.width + head * g.e, g.e, q);
#pragma unroll
            for (int c = 0; c < PER_LANE; c++) dk[c] += ds * q[c];
        }
    T *out = dqkv + (b * g.seq + t) * g.width;
    write_head(out + (g.heads + h) * g.e, g.e, dk);
    write_head(out + g.value(h), g.v, zero);
}

#define SHAPE Shape{seq, heads, kv_heads, e, v, (heads + kv_heads) * e + kv_heads * v}
#define SIZES int seq, int heads, int kv_heads, int e, int v
#define NAIVE(T, NAME)                                                                                                 \
    extern "C" __global__ void scores_##NAME(const T *qkv, const u32 *starts, T *p, SIZES, int window, float scale) {  \
        scores<T>(qkv, starts, p, SHAPE, window, scale);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void mix_##NAME(const T *p, const T *qkv, T *o, SIZES) { mix<T>(p, qkv, o, SHAPE); }         \
    extern "C" __global__ void mix_grad_weights_##NAME(const T *dout, const T *qkv, T *dp, SIZES) {                    \
        mix_grad_weights<T>(dout, qkv, dp, SHAPE);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void mix_grad_values_##NAME(const T *dout, const T *p, T *dqkv, SIZES) {                     \
        mix_grad_values<T>(dout, p, dqkv, SHAPE);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void row_means_##NAME(const T *dp, const T *p, float *means, SIZES) {                        \
        row_means<T>(dp, p, means, SHAPE);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void scores_grad_query_##NAME(const T *dp, const T *p, const T *qkv, const float *means,     \
                                                        T *dqkv, SIZES, float scale) {                                 \
        scores_grad_query<T>(dp, p, qkv, means, dqkv, SHAPE, scale);                                                   \
    }                                                                                                                  \
    extern "C" __global__ void scores_grad_key_##NAME(const T *dp, const T *p, const T *qkv, const float *means,       \
                                                      T *dqkv, SIZES, float scale) {                                   \
        scores_grad_key<T>(dp, p, qkv, means, dqkv, SHAPE, scale);                                                     \
    }
NAIVE(float, f32)
NAIVE(bf16, bf16)
NAIVE(f16, f16)
