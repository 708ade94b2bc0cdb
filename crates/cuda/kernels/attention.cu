// Causal attention over packed Q·K·V, correct for any shape: what runs where cuDNN does not. One warp per row; a lane has
// elements lane, lane + 32, … of a head.

const int MOST_PER_LANE = 8;

struct Heads {
    int seq, heads, kv_heads, e, width;
    // Keys that a query sees at most.
    int window;
};

template <typename T>
static __device__ __forceinline__ void read_head(const T *x, int e, float *out) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) {
        int i = c * 32 + lane;
        out[c] = i < e ? to_f32(x[i]) : 0.0f;
    }
}

static __device__ __forceinline__ float dot(const float *a, const float *b) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) sum += a[c] * b[c];
    return warp_sum(sum);
}

// The first key that a row sees.
static __device__ __forceinline__ int first_key(const u32 *starts, i64 row, int s, int window) {
    int first = s - window + 1 > 0 ? s - window + 1 : 0;
    if (!starts) return first;
    u32 start = starts[row];
    int given = start > (u32)s ? s : (int)start;
    return given > first ? given : first;
}

// Rows of queries over keys and values that stand at `keys` + position · stride.
template <typename T>
static __device__ void attend(const T *query, const T *keys, const T *values, i64 stride, int from, int to, int e,
                              float scale, float *o, float &lse) {
    float q[MOST_PER_LANE], k[MOST_PER_LANE];
    read_head(query, e, q);
    float max = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) o[c] = 0.0f;
    for (int t = from; t <= to; t++) {
        read_head(keys + t * stride, e, k);
        float score = dot(q, k) * scale;
        if (score > max) {
            float less = __expf(max - score);
            sum *= less;
#pragma unroll
            for (int c = 0; c < MOST_PER_LANE; c++) o[c] *= less;
            max = score;
        }
        float p = __expf(score - max);
        sum += p;
        read_head(values + t * stride, e, k);
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) o[c] += p * k[c];
    }
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) o[c] /= sum;
    lse = max + logf(sum);
}

template <typename T>
static __device__ __forceinline__ void write_head(T *to, int e, const float *x) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) {
        int i = c * 32 + lane;
        if (i < e) to[i] = Of<T>::f32(x[c]);
    }
}

// Grid: (positions ÷ warps, heads, batch).
template <typename T>
static __device__ void forward(const T *qkv, const u32 *starts, T *o, float *lse, Heads g, float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z;
    if (s >= g.seq) return;
    const T *base = qkv + b * g.seq * g.width;
    int kv = g.heads + h / (g.heads / g.kv_heads);
    float out[MOST_PER_LANE], row_lse;
    attend(base + (i64)s * g.width + h * g.e, base + kv * g.e, base + (kv + g.kv_heads) * g.e, g.width,
           first_key(starts, b * g.seq + s, s, g.window), s, g.e, scale, out, row_lse);
    write_head(o + ((b * g.seq + s) * g.heads + h) * g.e, g.e, out);
    if (lse && (threadIdx.x & 31) == 0) lse[(b * g.heads + h) * g.seq + s] = row_lse;
}

// delta[b, h, s] = Σ do · o.
template <typename T>
static __device__ void grad_delta(const T *dout, const T *o, float *delta, Heads g) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z;
    if (s >= g.seq) return;
    i64 at = ((b * g.seq + s) * g.heads + h) * g.e;
    float x[MOST_PER_LANE], y[MOST_PER_LANE];
    read_head(dout + at, g.e, x);
    read_head(o + at, g.e, y);
    float sum = dot(x, y);
    if ((threadIdx.x & 31) == 0) delta[(b * g.heads + h) * g.seq + s] = sum;
}

template <typename T>
static __device__ void grad_query(const T *dout, const T *qkv, const float *lse, const float *delta, const u32 *starts,
                                  T *dqkv, Heads g, float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z;
    if (s >= g.seq) return;
    const T *base = qkv + b * g.seq * g.width;
    int kv = g.heads + h / (g.heads / g.kv_heads);
    float q[MOST_PER_LANE], d[MOST_PER_LANE], k[MOST_PER_LANE], v[MOST_PER_LANE], dq[MOST_PER_LANE];
    read_head(base + (i64)s * g.width + h * g.e, g.e, q);
    read_head(dout + ((b * g.seq + s) * g.heads + h) * g.e, g.e, d);
    float l = lse[(b * g.heads + h) * g.seq + s], mean = delta[(b * g.heads + h) * g.seq + s];
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) dq[c] = 0.0f;
    for (int t = first_key(starts, b * g.seq + s, s, g.window); t <= s; t++) {
        read_head(base + (i64)t * g.width + kv * g.e, g.e, k);
        read_head(base + (i64)t * g.width + (kv + g.kv_heads) * g.e, g.e, v);
        float ds = __expf(dot(q, k) * scale - l) * (dot(d, v) - mean) * scale;
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) dq[c] += ds * k[c];
    }
    write_head(dqkv + (b * g.seq + s) * g.width + h * g.e, g.e, dq);
}

// Grid: (positions ÷ warps, key heads, batch).
template <typename T>
static __device__ void grad_key(const T *dout, const T *qkv, const float *lse, const float *delta, const u32 *starts,
                                T *dqkv, Heads g, float scale) {
    int t = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), u = blockIdx.y;
    i64 b = blockIdx.z;
    if (t >= g.seq) return;
    const T *base = qkv + b * g.seq * g.width;
    int group = g.heads / g.kv_heads;
    float k[MOST_PER_LANE], v[MOST_PER_LANE], dk[MOST_PER_LANE], dv[MOST_PER_LANE], q[MOST_PER_LANE], d[MOST_PER_LANE];
    i64 key = (i64)t * g.width + (g.heads + u) * g.e, value = key + (i64)g.kv_heads * g.e;
    read_head(base + key, g.e, k);
    read_head(base + value, g.e, v);
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) dk[c] = dv[c] = 0.0f;
    for (int h = u * group; h < (u + 1) * group; h++) {
        for (int s = t; s < g.seq && s - t < g.window; s++) {
            if (first_key(starts, b * g.seq + s, s, g.window) > t) continue;
            read_head(base + (i64)s * g.width + h * g.e, g.e, q);
            read_head(dout + ((b * g.seq + s) * g.heads + h) * g.e, g.e, d);
            i64 row = (b * g.heads + h) * g.seq + s;
            float p = __expf(dot(q, k) * scale - lse[row]);
            float ds = p * (dot(d, v) - delta[row]) * scale;
#pragma unroll
            for (int c = 0; c < MOST_PER_LANE; c++) {
                dv[c] += p * d[c];
                dk[c] += ds * q[c];
            }
        }
    }
    T *out = dqkv + b * g.seq * g.width;
    write_head(out + key, g.e, dk);
    write_head(out + value, g.e, dv);
}

// New keys and values go into the cache [b, context, 2 · kv_heads · e]. Grid: (positions, batch).
template <typename T>
static __device__ void cache_write(const T *qkv, T *cache, const u32 *start, const u32 *count, Heads g, int context) {
    int s = blockIdx.x;
    i64 b = blockIdx.y;
    i64 to = (i64)start[b] + s;
    if (s >= (int)count[b] || to >= context) return;
    int cached = 2 * g.kv_heads * g.e;
    const T *from = qkv + (b * g.seq + s) * g.width + g.heads * g.e;
    for (int i = threadIdx.x; i < cached; i += blockDim.x) cache[(b * context + to) * cached + i] = from[i];
}

template <typename T>
static __device__ void cached(const T *qkv, const T *cache, const u32 *start, const u32 *count, T *o, Heads g,
                              int context, float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z;
    if (s >= g.seq) return;
    float out[MOST_PER_LANE] = {}, lse;
    i64 last = (i64)start[b] + s;
    if (s < (int)count[b] && last < context) {
        i64 stride = 2 * g.kv_heads * g.e;
        const T *keys = cache + b * context * stride + h / (g.heads / g.kv_heads) * g.e;
        attend(qkv + (b * g.seq + s) * g.width + h * g.e, keys, keys + g.kv_heads * g.e, stride,
               first_key(0, 0, (int)last, g.window), (int)last, g.e,
               scale, out, lse);
    }
    write_head(o + ((b * g.seq + s) * g.heads + h) * g.e, g.e, out);
}

#define ATTENTION(T, NAME)                                                                                             \
    extern "C" __global__ void attention_##NAME(const T *qkv, const u32 *starts, T *o, float *lse, int seq, int heads, \
                                                int kv_heads, int e, int window, float scale) {                                    \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, window};                                               \
        forward<T>(qkv, starts, o, lse, g, scale);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void attention_delta_##NAME(const T *dout, const T *o, float *delta, int seq, int heads,     \
                                                      int kv_heads, int e) {                                           \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, 0};                                               \
        grad_delta<T>(dout, o, delta, g);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void attention_grad_query_##NAME(const T *dout, const T *qkv, const float *lse,              \
                                                           const float *delta, const u32 *starts, T *dqkv, int seq,    \
                                                           int heads, int kv_heads, int e, int window, float scale) {              \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, window};                                               \
        grad_query<T>(dout, qkv, lse, delta, starts, dqkv, g, scale);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void attention_grad_key_##NAME(const T *dout, const T *qkv, const float *lse,                \
                                                         const float *delta, const u32 *starts, T *dqkv, int seq,      \
                                                         int heads, int kv_heads, int e, int window, float scale) {                \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, window};                                               \
        grad_key<T>(dout, qkv, lse, delta, starts, dqkv, g, scale);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void cache_write_##NAME(const T *qkv, T *cache, const u32 *start, const u32 *count, int seq, \
                                                  int heads, int kv_heads, int e, int context) {                       \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, 0};                                               \
        cache_write<T>(qkv, cache, start, count, g, context);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void cached_attention_##NAME(const T *qkv, const T *cache, const u32 *start,                 \
                                                       const u32 *count, T *o, int seq, int heads, int kv_heads,       \
                                                       int e, int context, int window, float scale) {                              \
        Heads g = {seq, heads, kv_heads, e, (heads + 2 * kv_heads) * e, window};                                               \
        cached<T>(qkv, cache, start, count, o, g, context, scale);                                                     \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
