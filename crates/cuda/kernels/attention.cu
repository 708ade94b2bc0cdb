// Causal attention, correct for any shape: what runs where cuDNN does not. Keys follow queries in packed rows or in rows of their
// own; a rank may have parts of the positions, others of the keys than of the queries. One warp per row; a lane has elements
// lane, lane + 32, … of a head.

const int MOST_PER_LANE = 8;

struct Heads {
    // Elements of a head of Q and K, and of V.
    int seq, heads, kv_heads, e, v;
    // Keys of a sequence, and those that a query sees at most.
    int keys, window;
    // Elements from a query to the next, from a key to the next, and from the keys of a row to its values.
    int width, key_width, value;
    // Which positions they are.
    Span at, key_at;
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

template <typename T>
static __device__ __forceinline__ void write_head(T *to, int e, const float *x) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) {
        int i = c * 32 + lane;
        if (i < e) to[i] = Of<T>::f32(x[c]);
    }
}

static __device__ __forceinline__ float dot(const float *a, const float *b) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) sum += a[c] * b[c];
    return warp_sum(sum);
}

// The first position that the query at position `s` sees; `row` is where it stands in all sequences.
static __device__ __forceinline__ int first_key(const u32 *starts, i64 row, int s, int window) {
    int first = s - window + 1 > 0 ? s - window + 1 : 0;
    if (!starts) return first;
    u32 start = starts[row];
    int given = start > (u32)s ? s : (int)start;
    return given > first ? given : first;
}

// Places of a part: from `begin` to before `end`.
struct Places {
    int begin, end;
};

// Where positions `from` to `to` stand in one of the two runs of a part of `len`.
static __device__ __forceinline__ Places places(const Span &span, int len, int run, i64 from, i64 to) {
    int count = span.count < len ? span.count : len;
    i64 first = run ? span.then : span.first, base = run ? count : 0, n = run ? len - count : count;
    i64 begin = from > first ? from - first : 0, end = to - first + 1 < n ? to - first + 1 : n;
    return {(int)(base + begin), (int)(base + end)};
}

// A row of a softmax under way.
struct Softmax {
    float q[MOST_PER_LANE], o[MOST_PER_LANE];
    float max, sum;

    template <typename T>
    __device__ __forceinline__ Softmax(const T *query, int e) : max(NEGATIVE_INFINITY), sum(0.0f) {
        read_head(query, e, q);
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) o[c] = 0.0f;
    }

    // Keys and values that stand at `keys` + place · stride.
    template <typename T>
    __device__ __forceinline__ void attend(const T *keys, const T *values, i64 stride, Places at, int e, int v, float scale) {
        float k[MOST_PER_LANE];
        for (int t = at.begin; t < at.end; t++) {
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
            read_head(values + t * stride, v, k);
#pragma unroll
            for (int c = 0; c < MOST_PER_LANE; c++) o[c] += p * k[c];
        }
    }

    // The log-sum-exp: −∞ with zeros where there was no key.
    __device__ __forceinline__ float end() {
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) o[c] = sum > 0.0f ? o[c] / sum : 0.0f;
        return sum > 0.0f ? max + logf(sum) : NEGATIVE_INFINITY;
    }
};

// Grid: (positions ÷ warps, heads, batch).
template <typename T, typename O>
static __device__ void forward(const T *queries, const T *keys, const u32 *starts, O *o, float *lse, Heads g,
                               float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z, row = b * g.seq + s;
    if (s >= g.seq) return;
    int u = h / (g.heads / g.kv_heads);
    const T *all = keys + b * g.keys * g.key_width, *key = all + u * g.e, *value = all + g.value + u * g.v;
    int position = g.at.entry(s), first = first_key(starts, row, position, g.window);
    Softmax softmax(queries + row * g.width + h * g.e, g.e);
    for (int run = 0; run < 2; run++) {
        Places seen = places(g.key_at, g.keys, run, first, position);
        softmax.attend(key, value, g.key_width, seen, g.e, g.v, scale);
    }
    float row_lse = softmax.end();
    if (o) write_head(o + (row * g.heads + h) * g.v, g.v, softmax.o);
    if (lse && (threadIdx.x & 31) == 0) lse[(b * g.heads + h) * g.seq + s] = row_lse;
}

// delta[b, h, s] = Σ do · o.
template <typename T>
static __device__ void grad_delta(const T *dout, const T *o, float *delta, int seq, int heads, int v) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z;
    if (s >= seq) return;
    i64 at = ((b * seq + s) * heads + h) * v;
    float x[MOST_PER_LANE], y[MOST_PER_LANE];
    read_head(dout + at, v, x);
    read_head(o + at, v, y);
    float sum = dot(x, y);
    if ((threadIdx.x & 31) == 0) delta[(b * heads + h) * seq + s] = sum;
}

// dq goes to rows of `to_width` elements.
template <typename T, typename O>
static __device__ void grad_query(const T *dout, const T *queries, const T *keys, const float *lse, const float *delta,
                                  const u32 *starts, O *to, int to_width, Heads g, float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z, row = b * g.seq + s;
    if (s >= g.seq) return;
    int u = h / (g.heads / g.kv_heads);
    const T *all = keys + b * g.keys * g.key_width, *key = all + u * g.e, *value = all + g.value + u * g.v;
    float q[MOST_PER_LANE], d[MOST_PER_LANE], k[MOST_PER_LANE], v[MOST_PER_LANE], dq[MOST_PER_LANE];
    read_head(queries + row * g.width + h * g.e, g.e, q);
    read_head(dout + (row * g.heads + h) * g.v, g.v, d);
    float l = lse[(b * g.heads + h) * g.seq + s], mean = delta[(b * g.heads + h) * g.seq + s];
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) dq[c] = 0.0f;
    int position = g.at.entry(s), first = first_key(starts, row, position, g.window);
    for (int run = 0; run < 2; run++) {
        Places seen = places(g.key_at, g.keys, run, first, position);
        for (int t = seen.begin; t < seen.end; t++) {
            read_head(key + (i64)t * g.key_width, g.e, k);
            read_head(value + (i64)t * g.key_width, g.v, v);
            float ds = __expf(dot(q, k) * scale - l) * (dot(d, v) - mean) * scale;
#pragma unroll
            for (int c = 0; c < MOST_PER_LANE; c++) dq[c] += ds * k[c];
        }
    }
    write_head(to + row * to_width + h * g.e, g.e, dq);
}

// dk goes to rows of `to_width` elements, dv after it as values follow keys. Grid: (keys ÷ warps, key heads, batch).
template <typename T, typename O>
static __device__ void grad_key(const T *dout, const T *queries, const T *keys, const float *lse, const float *delta,
                                const u32 *starts, O *to, int to_width, Heads g, float scale) {
    int t = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), u = blockIdx.y;
    i64 b = blockIdx.z;
    if (t >= g.keys) return;
    const T *all = keys + (b * g.keys + t) * g.key_width;
    int group = g.heads / g.kv_heads;
    float k[MOST_PER_LANE], v[MOST_PER_LANE], dk[MOST_PER_LANE], dv[MOST_PER_LANE], q[MOST_PER_LANE], d[MOST_PER_LANE];
    read_head(all + u * g.e, g.e, k);
    read_head(all + g.value + u * g.v, g.v, v);
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) dk[c] = dv[c] = 0.0f;
    int position = g.key_at.entry(t);
    for (int h = u * group; h < (u + 1) * group; h++) {
        for (int run = 0; run < 2; run++) {
            Places see = places(g.at, g.seq, run, position, (i64)position + g.window - 1);
            for (int s = see.begin; s < see.end; s++) {
                i64 row = b * g.seq + s, head = (b * g.heads + h) * g.seq + s;
                if (first_key(starts, row, g.at.entry(s), g.window) > position) continue;
                read_head(queries + row * g.width + h * g.e, g.e, q);
                read_head(dout + (row * g.heads + h) * g.v, g.v, d);
                float p = __expf(dot(q, k) * scale - lse[head]);
                float ds = p * (dot(d, v) - delta[head]) * scale;
#pragma unroll
                for (int c = 0; c < MOST_PER_LANE; c++) {
                    dv[c] += p * d[c];
                    dk[c] += ds * q[c];
                }
            }
        }
    }
    O *out = to + (b * g.keys + t) * to_width;
    write_head(out + u * g.e, g.e, dk);
    write_head(out + g.value + u * g.v, g.v, dv);
}

// Which pages of a cache [pages, page, kv_heads · (e + v)] the blocks of a text are in.
struct Pages {
    const u32 *table;
    int blocks, page;

    __device__ __forceinline__ i64 row(u32 slot, int block) const { return (i64)table[(i64)slot * blocks + block] * page; }
};

// New keys and values go into the cache. Grid: (positions, batch).
template <typename T>
static __device__ void cache_write(const T *qkv, T *cache, Pages pages, const u32 *slot, const u32 *start, const u32 *count,
                                   int seq, int heads, int kv_heads, int e, int v) {
    int s = blockIdx.x;
    i64 b = blockIdx.y;
    let_next_begin();
    wait_for_those_before();
    i64 to = (i64)start[b] + s;
    if (s >= (int)count[b] || to >= (i64)pages.blocks * pages.page) return;
    int cached = kv_heads * (e + v);
    const T *from = qkv + (b * seq + s) * (heads * e + cached) + heads * e;
    i64 row = pages.row(slot[b], to / pages.page) + to % pages.page;
    for (int i = threadIdx.x; i < cached; i += blockDim.x) cache[row * cached + i] = from[i];
}

template <typename T>
static __device__ void cached(const T *qkv, const T *cache, Pages pages, const u32 *slot, const u32 *start, const u32 *count,
                              const float *sinks, T *o, int seq, int heads, int kv_heads, int e, int v, int window,
                              float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z, row = b * seq + s;
    if (s >= seq) return;
    i64 stride = kv_heads * (e + v);
    Softmax softmax(qkv + row * (heads * e + stride) + h * e, e);
    i64 last = (i64)start[b] + s;
    if (s < (int)count[b] && last < (i64)pages.blocks * pages.page) {
        int u = h / (heads / kv_heads), first = first_key(0, 0, (int)last, window);
        for (int block = first / pages.page; block * pages.page <= last; block++) {
            const T *all = cache + pages.row(slot[b], block) * stride;
            int from = block * pages.page, end = (int)last + 1 - from;
            Places seen = {first > from ? first - from : 0, end < pages.page ? end : pages.page};
            softmax.attend(all + u * e, all + kv_heads * e + u * v, stride, seen, e, v, scale);
        }
    }
    float lse = softmax.end();
    // What a sink leaves to the keys, where there are sinks.
    float share = sinks ? 1.0f / (1.0f + expf(sinks[h] - lse)) : 1.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) softmax.o[c] *= share;
    write_head(o + (row * heads + h) * v, v, softmax.o);
}

#define SIZES                                                                                                          \
    int seq, int heads, int kv_heads, int e, int v, int keys, int window, int width, int key_width, int value,         \
        int first, int count, int then, int key_first, int key_count, int key_then
#define HEADS                                                                                                          \
    {seq,   heads,     kv_heads, e,                    v,                                 keys, window,               \
     width, key_width, value,    {first, count, then}, {key_first, key_count, key_then}}

// From T to O.
#define ATTENTION(T, O, NAME)                                                                                          \
    extern "C" __global__ void attention_##NAME(const T *queries, const T *kv, const u32 *starts, O *o, float *lse,    \
                                                SIZES, float scale) {                                                  \
        forward<T, O>(queries, kv, starts, o, lse, HEADS, scale);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void attention_grad_query_##NAME(const T *dout, const T *queries, const T *kv,               \
                                                           const float *lse, const float *delta, const u32 *starts,    \
                                                           O *to, int to_width, SIZES, float scale) {                  \
        grad_query<T, O>(dout, queries, kv, lse, delta, starts, to, to_width, HEADS, scale);                           \
    }                                                                                                                  \
    extern "C" __global__ void attention_grad_key_##NAME(const T *dout, const T *queries, const T *kv,                 \
                                                         const float *lse, const float *delta, const u32 *starts,      \
                                                         O *to, int to_width, SIZES, float scale) {                    \
        grad_key<T, O>(dout, queries, kv, lse, delta, starts, to, to_width, HEADS, scale);                             \
    }
ATTENTION(float, float, f32)
ATTENTION(bf16, bf16, bf16)
ATTENTION(bf16, float, bf16_to_f32)
ATTENTION(f16, f16, f16)
ATTENTION(f16, float, f16_to_f32)

#define OF_A_TYPE(T, NAME)                                                                                             \
    extern "C" __global__ void attention_delta_##NAME(const T *dout, const T *o, float *delta, int seq, int heads,     \
                                                      int v) {                                                         \
        grad_delta<T>(dout, o, delta, seq, heads, v);                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void cache_write_##NAME(const T *qkv, T *cache, const u32 *table, const u32 *slot,           \
                                                  const u32 *start, const u32 *count, int blocks, int page, int seq,   \
                                                  int heads, int kv_heads, int e, int v) {                             \
        cache_write<T>(qkv, cache, {table, blocks, page}, slot, start, count, seq, heads, kv_heads, e, v);             \
    }                                                                                                                  \
    extern "C" __global__ void cached_attention_##NAME(                                                                \
        const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start, const u32 *count,           \
        const float *sinks, T *o, int blocks, int page, int seq, int heads, int kv_heads, int e, int v, int window,    \
        float scale) {                                                                                                 \
        cached<T>(qkv, cache, {table, blocks, page}, slot, start, count, sinks, o, seq, heads, kv_heads, e, v, window, \
                  scale);                                                                                              \
    }
OF_A_TYPE(float, f32)
OF_A_TYPE(bf16, bf16)
OF_A_TYPE(f16, f16)
