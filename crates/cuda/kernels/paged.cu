// Attention of new positions over the pages of a cache, and the token that greedy decoding takes.
//
// Of one new position of each text: decoding. A block has the keys of one page and one head of K and V,
// for all heads of Q that share them; its part of the softmax is merged with those of other pages by a second kernel. How keys are divided
// depends on their positions alone, so the bits of a text do not depend on the texts beside it.

struct Paged {
    int blocks, page, heads, kv_heads, window;

    // The first position that the text's new one, at `last`, sees.
    __device__ __forceinline__ int first(int last) const { return last - window + 1 > 0 ? last - window + 1 : 0; }
};

// A lane has 8 elements of a head of 8 · L: L lanes have a key, a warp 32 ÷ L keys at once.
const int GROUP = 8;
const int DECODE_WARPS = 4;

template <typename T, int L>
static __device__ void decode(const T *qkv, T *cache, const u32 *table, const u32 *slot, const u32 *start, const u32 *count,
                              float *parts, Paged n, float scale) {
    const int E = 8 * L, KEYS = 32 / L;
    int block = blockIdx.x, u = blockIdx.y, group = n.heads / n.kv_heads;
    i64 b = blockIdx.z;
    let_next_begin();
    // Which pages there are is written by the host, before any kernel runs.
    if (!count[b]) return;
    int last = start[b], first = n.first(last), from = block * n.page;
    if (from > last || from + n.page <= first) return;
    i64 stride = 2 * n.kv_heads * E;
    const T *row = qkv + b * (n.heads * E + stride);
    T *rows = cache + (i64)table[(i64)slot[b] * n.blocks + block] * n.page * stride;
    wait_for_those_before();
    if (last < from + n.page) {
        // This page takes the new key and value: no other block reads them.
        T *to = rows + (last - from) * stride;
        const T *kv = row + n.heads * E;
        for (int i = threadIdx.x; i < 2 * E; i += blockDim.x) {
            int at = i < E ? u * E + i : (n.kv_heads + u) * E + i - E;
            to[at] = kv[at];
        }
        __syncthreads();
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of = lane / L, at = lane % L * 8;
    float q[GROUP][8], o[GROUP][8], top[GROUP], sum[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        if (g < group) load(row + (u * group + g) * E + at, q[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) o[g][i] = 0.0f;
        top[g] = NEGATIVE_INFINITY, sum[g] = 0.0f;
    }
    int begin = first > from ? first - from : 0, end = last - from + 1 < n.page ? last - from + 1 : n.page;
    // Keys are read ahead of the sums that wait for them.
    const int AHEAD = 3;
    for (int t0 = warp * KEYS; t0 < end; t0 += AHEAD * DECODE_WARPS * KEYS) {
        Pack<T> keys[AHEAD], values[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int key = t0 + a * DECODE_WARPS * KEYS + of;
            const T *kv = rows + (key >= begin && key < end ? key : begin) * stride + at;
            keys[a] = *(const Pack<T> *)(kv + u * E), values[a] = *(const Pack<T> *)(kv + (n.kv_heads + u) * E);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int key = t0 + a * DECODE_WARPS * KEYS + of;
            bool seen = key >= begin && key < end;
            float k[8], v[8];
            unpack(keys[a], k), unpack(values[a], v);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                if (g >= group) break;
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) score += q[g][i] * k[i];
#pragma unroll
                for (int step = L / 2; step; step >>= 1) score += __shfl_xor_sync(~0u, score, step);
                score = seen ? score * scale : NEGATIVE_INFINITY;
                float most = fmaxf(top[g], score), base = most == NEGATIVE_INFINITY ? 0.0f : most;
                float less = __expf(top[g] - base), p = __expf(score - base);
                top[g] = most;
                sum[g] = sum[g] * less + p;
#pragma unroll
                for (int i = 0; i < 8; i++) o[g][i] = o[g][i] * less + p * v[i];
            }
        }
    }
    // Keys of a warp, then of all warps.
    __shared__ float tops[DECODE_WARPS], sums[DECODE_WARPS], outs[DECODE_WARPS][E];
    for (int g = 0; g < group; g++) {
        float most = top[g];
#pragma unroll
        for (int step = L; step < 32; step <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        float less = __expf(top[g] - (most == NEGATIVE_INFINITY ? 0.0f : most));
        float all = sum[g] * less;
#pragma unroll
        for (int i = 0; i < 8; i++) o[g][i] *= less;
#pragma unroll
        for (int step = L; step < 32; step <<= 1) {
            all += __shfl_xor_sync(~0u, all, step);
#pragma unroll
            for (int i = 0; i < 8; i++) o[g][i] += __shfl_xor_sync(~0u, o[g][i], step);
        }
        if (lane < L) {
#pragma unroll
            for (int i = 0; i < 8; i++) outs[warp][at + i] = o[g][i];
            if (!lane) tops[warp] = most, sums[warp] = all;
        }
        __syncthreads();
        float of_all = NEGATIVE_INFINITY, total = 0.0f;
        for (int w = 0; w < DECODE_WARPS; w++) of_all = fmaxf(of_all, tops[w]);
        float *part = parts + ((b * n.heads + u * group + g) * n.blocks + block) * (E + 2);
        for (int i = threadIdx.x; i < E; i += blockDim.x) {
            float x = 0.0f;
            for (int w = 0; w < DECODE_WARPS; w++) x += outs[w][i] * __expf(tops[w] - of_all);
            part[2 + i] = x;
        }
        if (!threadIdx.x) {
            for (int w = 0; w < DECODE_WARPS; w++) total += sums[w] * __expf(tops[w] - of_all);
            part[0] = of_all, part[1] = total;
        }
        __syncthreads();
    }
}

// Grid: (heads, texts); a thread has an element of a head.
template <typename T>
static __device__ void merge(const float *parts, const u32 *start, const u32 *count, const float *sinks, T *o, Paged n,
                             int e) {
    int h = blockIdx.x, i = threadIdx.x;
    i64 b = blockIdx.y, head = b * n.heads + h;
    float x = 0.0f;
    let_next_begin();
    wait_for_those_before();
    if (count[b]) {
        int last = start[b];
        int from = n.first(last) / n.page, to = last / n.page + 1;
        const float *part = parts + head * n.blocks * (e + 2);
        float most = NEGATIVE_INFINITY, sum = 0.0f;
        for (int k = from; k < to; k++) most = fmaxf(most, part[k * (e + 2)]);
        for (int k = from; k < to; k++) {
            float weight = __expf(part[k * (e + 2)] - most);
            sum += weight * part[k * (e + 2) + 1];
            x += weight * part[k * (e + 2) + 2 + i];
        }
        // A sink counts in the denominator alone.
        x /= sinks ? sum + __expf(sinks[h] - most) : sum;
    }
    o[head * e + i] = Of<T>::f32(x);
}

// Of many new positions of a text, which are in the cache already: by the matrix units. A warp has 16 positions of one head, a block 64; keys come in tiles
// of 32, which lie in one page. The layout of operands is that of mma.m16n8k16: lane 4g + t has rows g and g + 8, and columns 2t and 2t + 1 of eight.
const int TILE = 32;
const int QUERIES = 64;

static __device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

static __device__ __forceinline__ void copy16(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0));
}

static __device__ __forceinline__ void matrices(u32 *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
static __device__ __forceinline__ void transposed(u32 *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

template <typename T, int L>
static __device__ void prefill(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start,
                               const u32 *count, const float *sinks, T *o, Paged n, int seq, float scale) {
    const int E = 8 * L, ROW = E + 8;
    __shared__ alignas(16) T keys[2][TILE * ROW], values[2][TILE * ROW];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int h = blockIdx.y, u = h / (n.heads / n.kv_heads);
    i64 b = blockIdx.z, stride = 2 * n.kv_heads * E, width = n.heads * E + stride;
    int from = start[b], all = count[b], first_query = blockIdx.x * QUERIES, low = first_query + 16 * warp + g;
    u32 q[E / 16][4];
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int s = low + 8 * (i & 1);
            const T *at = qkv + (b * seq + s) * width + h * E + 16 * k + 2 * t + 8 * (i >> 1);
            q[k][i] = s < all ? *(const u32 *)at : 0;
        }
    }
    float out[E / 8][4] = {}, top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
    int last_query = first_query + QUERIES < all ? first_query + QUERIES : all;
    int end = from + last_query, begin = n.first(from + first_query) / TILE * TILE;
    const u32 *pages = table + (i64)slot[b] * n.blocks;
    auto fetch = [&](int k0, int to) {
        const T *rows = cache + ((i64)pages[k0 / n.page] * n.page + k0 % n.page) * stride;
        for (int i = threadIdx.x; i < TILE * L; i += 128) {
            int key = i / L, at = i % L * 8;
            bool there = k0 + key < end;
            const T *row = rows + (there ? key : 0) * stride + at;
            copy16(&keys[to][key * ROW + at], row + u * E, there);
            copy16(&values[to][key * ROW + at], row + (n.kv_heads + u) * E, there);
        }
        asm volatile("cp.async.commit_group;");
    };
    if (first_query < all) fetch(begin, 0);
    for (int k0 = begin, now = 0; first_query < all && k0 < end; k0 += TILE, now ^= 1) {
        if (k0 + TILE < end) {
            fetch(k0 + TILE, now ^ 1);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        __syncthreads();
        float score[TILE / 8][4] = {};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int k = 0; k < E / 16; k += 2) {
                u32 r[4];
                matrices(r, &keys[now][(8 * j + lane % 8) * ROW + 16 * k + lane / 8 * 8]);
                units<T>(score[j], q[k][0], q[k][1], q[k][2], q[k][3], r[0], r[1]);
                units<T>(score[j], q[k + 1][0], q[k + 1][1], q[k + 1][2], q[k + 1][3], r[2], r[3]);
            }
        }
        float most[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int position = from + low + 8 * (i >> 1), key = k0 + 8 * j + 2 * t + (i & 1);
                bool seen = key <= position && key >= n.first(position);
                score[j][i] = seen ? score[j][i] * scale : NEGATIVE_INFINITY;
                most[i >> 1] = fmaxf(most[i >> 1], score[j][i]);
            }
        }
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
            base[i] = most[i] == NEGATIVE_INFINITY ? 0.0f : most[i];
            float less = __expf(top[i] - base[i]);
            top[i] = most[i];
            sum[i] *= less;
#pragma unroll
            for (int e = 0; e < E / 8; e++) out[e][2 * i] *= less, out[e][2 * i + 1] *= less;
        }
        u32 p[TILE / 8][2];
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = __expf(score[j][2 * i] - base[i]), y = __expf(score[j][2 * i + 1] - base[i]);
                sum[i] += x + y;
                p[j][i] = Of<T>::two(x, y);
            }
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
#pragma unroll
            for (int e = 0; e < E / 8; e += 2) {
                u32 r[4];
                int matrix = lane / 8;
                transposed(r, &values[now][(16 * k + (matrix & 1) * 8 + lane % 8) * ROW + (e + (matrix >> 1)) * 8]);
                units<T>(out[e], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], r[0], r[1]);
                units<T>(out[e + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], r[2], r[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
        sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        int s = low + 8 * i;
        if (s >= seq) continue;
        float total = sinks ? sum[i] + __expf(sinks[h] - top[i]) : sum[i];
        float by = s < all && sum[i] > 0.0f ? 1.0f / total : 0.0f;
        T *to = o + ((b * seq + s) * n.heads + h) * E + 2 * t;
#pragma unroll
        for (int e = 0; e < E / 8; e++) *(u32 *)(to + 8 * e) = Of<T>::two(out[e][2 * i] * by, out[e][2 * i + 1] * by);
    }
}

// The first of the largest logits of a row, of those that are known. Grid: rows.
template <typename T>
static __device__ void argmax(const T *logits, u32 *token, int vocab, int known) {
    const u32 NONE = ~0u;
    const T *row = logits + (i64)blockIdx.x * vocab;
    float best = NEGATIVE_INFINITY;
    u32 at = NONE;
    bool broken = false;
    let_next_begin();
    wait_for_those_before();
    for (int i = threadIdx.x; i < known; i += blockDim.x) {
        float x = to_f32(row[i]);
        broken |= !(x < -NEGATIVE_INFINITY);
        if (x > best) best = x, at = i;
    }
    __shared__ float bests[32];
    __shared__ u32 ats[32];
    __shared__ int any;
    if (!threadIdx.x) any = 0;
    __syncthreads();
    if (broken) any = 1;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        float other = __shfl_xor_sync(~0u, best, step);
        u32 other_at = __shfl_xor_sync(~0u, at, step);
        if (other > best || (other == best && other_at < at)) best = other, at = other_at;
    }
    if (!(threadIdx.x & 31)) bests[threadIdx.x >> 5] = best, ats[threadIdx.x >> 5] = at;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < blockDim.x >> 5; w++)
        if (bests[w] > best || (bests[w] == best && ats[w] < at)) best = bests[w], at = ats[w];
    token[blockIdx.x] = any ? NONE : at;
}

#define DECODE(T, NAME, L)                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)                                                    \
        decode_##L##_##NAME(const T *qkv, T *cache, const u32 *table, const u32 *slot, const u32 *start,               \
                            const u32 *count, float *parts, int blocks, int page, int heads, int kv_heads, int window, \
                            float scale) {                                                                             \
        decode<T, L>(qkv, cache, table, slot, start, count, parts, {blocks, page, heads, kv_heads, window}, scale);    \
    }
#define PREFILL(T, NAME, L)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        prefill_##L##_##NAME(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start,        \
                             const u32 *count, const float *sinks, T *o, int blocks, int page, int heads,              \
                             int kv_heads, int window, int seq, float scale) {                                         \
        prefill<T, L>(qkv, cache, table, slot, start, count, sinks, o, {blocks, page, heads, kv_heads, window}, seq,   \
                      scale);                                                                                          \
    }
#define ARGMAX(T, NAME)                                                                                                \
    extern "C" __global__ void argmax_##NAME(const T *logits, u32 *token, int vocab, int known) {                      \
        argmax<T>(logits, token, vocab, known);                                                                        \
    }
#define DECODES(T, NAME)                                                                                               \
    DECODE(T, NAME, 8)                                                                                                 \
    DECODE(T, NAME, 16)                                                                                                \
    PREFILL(T, NAME, 8)                                                                                                \
    PREFILL(T, NAME, 16)                                                                                               \
    extern "C" __global__ void decode_merge_##NAME(const float *parts, const u32 *start, const u32 *count,             \
                                                   const float *sinks, T *o, int blocks, int page, int heads,          \
                                                   int kv_heads, int window, int e) {                                  \
        merge<T>(parts, start, count, sinks, o, {blocks, page, heads, kv_heads, window}, e);                           \
    }
DECODES(bf16, bf16)
DECODES(f16, f16)
ARGMAX(float, f32)
ARGMAX(bf16, bf16)
ARGMAX(f16, f16)
