// Attention of new positions over the pages of a cache, and the token that greedy decoding takes.

struct Paged {
    int blocks, page, heads, kv_heads, window;

    // The first position that the text's new one, at `last`, sees.
    __device__ __forceinline__ int first(int last) const { return last - window + 1 > 0 ? last - window + 1 : 0; }
};

// Of one new position of each text: decoding. A block has a head of K and V of a text, for all heads of Q that share them; of long texts several blocks have a share of
// the keys each, and a second kernel merges their parts of the softmax. How keys are divided depends on their positions and on how many
// shares there are, so where that is the same the bits of a text do not depend on the texts beside it.
//
// Where rows are texts of their own, the block turns the new key by RoPE and stores it and its value in the cache; else another kernel has done so.

// Elements `at` to `at` + 8 of a head, turned by the angles of a position and rounded.
template <typename T>
static __device__ __forceinline__ uint4 turned_pack(const T *head, int at, const float *angles, int turned) {
    Pack<T> own = *(const Pack<T> *)(head + at);
    if (!angles || at >= turned) return *(const uint4 *)&own;
    int half = turned / 2;
    bool upper = at >= half;
    Pack<T> other = *(const Pack<T> *)(head + (upper ? at - half : at + half));
    float x[8], y[8];
    unpack(own, x), unpack(other, y);
    const float *c = angles + (upper ? at - half : at), *s = c + half;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = upper ? x[i] * c[i] + y[i] * s[i] : x[i] * c[i] - y[i] * s[i];
    Pack<T> out;
    pack(x, out);
    return *(const uint4 *)&out;
}

static __device__ __forceinline__ u32 halves(u32 low, u32 high, bool upper) {
    return __byte_perm(low, high, upper ? 0x7632 : 0x5410);
}

// A warp takes 16 keys at a time. The matrix units have heads of Q as rows (those past 8 are zero); a lane of a quad has 8 elements of a key where K is read, and a lane of
// eight where V is: which element is which does not matter to a sum as long as both factors agree.
const int ASKED = 4, FEW_BLOCKS = 128;
template <typename T, int L, int WARPS>
static __device__ __forceinline__ void attend(const T *qkv, T *cache, const u32 *table, const u32 *slot, const u32 *start,
                                              const u32 *count, const float *sinks, const float *angles, float *parts,
                                              T *o, Paged n, int table_rows, int turned, int own, float scale) {
    const int E = 8 * L, PACKS = E / 32, HALVES = E / 64, GROUP = 8;
    __shared__ float tops[WARPS][GROUP], sums[WARPS][GROUP], outs[WARPS][GROUP][E];
    int u = blockIdx.x, group = n.heads / n.kv_heads, shares = gridDim.z, stride_keys = 16 * WARPS * shares;
    i64 b = blockIdx.y, head = b * n.heads + u * group;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    let_next_begin();
    // Which pages there are is written by the host, before any kernel runs.
    if (!count[b]) {
        wait_for_those_before();
        for (int i = threadIdx.x; shares == 1 && i < group * E; i += blockDim.x) o[head * E + i] = Of<T>::f32(0.0f);
        return;
    }
    // What is in the cache before this kernel: the new key comes later where it is this block's to store.
    int last = start[b], first = n.first(last), end = last + !own;
    i64 stride = 2 * n.kv_heads * E;
    const u32 *pages = table + (i64)slot[b] * n.blocks;
    auto row_of = [&](int key) { return cache + ((i64)pages[key / n.page] * n.page + key % n.page) * stride + u * E; };
    // Where blocks are few, what a warp has some turns later comes to L2 meanwhile: a key or a value for each lane, by lines of 128 bytes.
    bool few = gridDim.x * gridDim.y * gridDim.z < FEW_BLOCKS;
    auto ask_for = [&](int base) {
        int key = base + (lane & 15);
        if (!few || key >= end) return;
        const char *line = (const char *)(row_of(key) + (lane < 16 ? 0 : n.kv_heads * E));
#pragma unroll
        for (int i = 0; i < 2 * E; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(line + i));
    };
    auto key_of = [&](int i) { return 2 * t + (i & 1) + 8 * (i >> 1); };
    uint4 keys[2][PACKS], values[4][HALVES];
    const uint4 ZERO = {0, 0, 0, 0};
    auto fetch_keys = [&](int base) {
        if (base >= end) return;
        const T *rows = row_of(base) + t * 8;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
                keys[i][p] = base + 8 * i + g < end ? *(const uint4 *)(rows + (8 * i + g) * stride + 32 * p) : ZERO;
    };
    auto fetch_values = [&](int base) {
        if (base >= end) return;
        const T *rows = row_of(base) + n.kv_heads * E + g * 8;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                values[i][h] = base + key_of(i) < end ? *(const uint4 *)(rows + key_of(i) * stride + 64 * h) : ZERO;
    };
#pragma unroll
    for (int p = 0; p < PACKS; p++) keys[0][p] = keys[1][p] = ZERO;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) values[i][h] = ZERO;
    // Keys and values of earlier calls come while the kernel before still makes the new ones.
    int base = first / 16 * 16 + 16 * (WARPS * blockIdx.z + warp);
    if (!own) wait_for_those_before();
    fetch_keys(base), fetch_values(base);
#pragma unroll
    for (int i = 1; i < ASKED; i++) ask_for(base + i * stride_keys);
    int place = last < table_rows ? last : table_rows - 1;
    const float *turn = angles ? angles + (i64)place * turned : 0;
    if (own) wait_for_those_before();
    const T *row = qkv + b * (n.heads * E + stride);
    uint4 q[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) q[p] = g < group ? turned_pack(row + (u * group + g) * E, 32 * p + t * 8, turn, turned) : ZERO;
    float out[8 * HALVES][4] = {}, top = NEGATIVE_INFINITY, sum = 0.0f;
    for (; base <= last; base += stride_keys) {
        if (own && last < base + 16) {
            const T *key = row + (n.heads + u) * E, *value = key + n.kv_heads * E;
            T *kept = (T *)row_of(last);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                uint4 x = turned_pack(key, 32 * p + t * 8, turn, turned);
                if (!g) *(uint4 *)(kept + 32 * p + t * 8) = x;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (base + 8 * i + g == last) keys[i][p] = x;
            }
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                uint4 x = *(const uint4 *)(value + 64 * h + g * 8);
                if (!t) *(uint4 *)(kept + n.kv_heads * E + 64 * h + g * 8) = x;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (base + key_of(i) == last) values[i][h] = x;
            }
        }
        float score[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                units<T>(score[i], q[p].x, 0, q[p].y, 0, keys[i][p].x, keys[i][p].y);
                units<T>(score[i], q[p].z, 0, q[p].w, 0, keys[i][p].z, keys[i][p].w);
            }
        }
        fetch_keys(base + stride_keys);
        ask_for(base + ASKED * stride_keys);
        float most = top;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int key = base + 8 * i + 2 * t + j;
                score[i][j] = key >= first && key <= last ? score[i][j] * scale : NEGATIVE_INFINITY;
                most = fmaxf(most, score[i][j]);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float from = most == NEGATIVE_INFINITY ? 0.0f : most, less = __expf(top - from);
        top = most;
        float p00 = __expf(score[0][0] - from), p01 = __expf(score[0][1] - from);
        float p10 = __expf(score[1][0] - from), p11 = __expf(score[1][1] - from);
        sum = sum * less + (p00 + p01 + p10 + p11);
        u32 low = Of<T>::two(p00, p01), high = Of<T>::two(p10, p11);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const u32 *v[4] = {(const u32 *)&values[0][h], (const u32 *)&values[1][h], (const u32 *)&values[2][h], (const u32 *)&values[3][h]};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float *c = out[8 * h + j];
                c[0] *= less, c[1] *= less;
                units<T>(c, low, 0, high, 0, halves(v[0][j / 2], v[1][j / 2], j & 1), halves(v[2][j / 2], v[3][j / 2], j & 1));
            }
        }
        fetch_values(base + stride_keys);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (g < group) {
        if (!t) tops[warp][g] = top, sums[warp][g] = sum;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float *at = outs[warp][g] + 64 * h + 16 * t + j;
                at[0] = out[8 * h + j][0], at[8] = out[8 * h + j][1];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * E; i += blockDim.x) {
        int of = i / E, e = i % E;
        float most = NEGATIVE_INFINITY, x = 0.0f, all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w][of]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float by = __expf(tops[w][of] - (most == NEGATIVE_INFINITY ? 0.0f : most));
            x += by * outs[w][of][e], all += by * sums[w][of];
        }
        if (shares > 1) {
            float *part = parts + ((head + of) * shares + blockIdx.z) * (E + 2);
            part[2 + e] = x;
            if (!e) part[0] = most, part[1] = all;
            continue;
        }
        // A sink counts in the denominator alone.
        if (sinks) all += __expf(sinks[u * group + of] - most);
        o[head * E + i] = Of<T>::f32(x / all);
    }
}

// Grid: (heads, texts); a thread has an element of a head.
template <typename T>
static __device__ void merge(const float *parts, const u32 *count, const float *sinks, T *o, int heads, int shares, int e) {
    int h = blockIdx.x, i = threadIdx.x;
    i64 b = blockIdx.y, head = b * heads + h;
    float x = 0.0f;
    let_next_begin();
    wait_for_those_before();
    if (count[b]) {
        const float *part = parts + head * shares * (e + 2);
        float most = NEGATIVE_INFINITY, sum = 0.0f;
        for (int k = 0; k < shares; k++) most = fmaxf(most, part[k * (e + 2)]);
        for (int k = 0; k < shares; k++) {
            float weight = __expf(part[k * (e + 2)] - most);
            sum += weight * part[k * (e + 2) + 1];
            x += weight * part[k * (e + 2) + 2 + i];
        }
        x /= sinks ? sum + __expf(sinks[h] - most) : sum;
    }
    o[head * e + i] = Of<T>::f32(x);
}

// Of many new positions of a text, which are in the cache already: by the matrix units. A warp has 16 positions of one head, a block 64; keys come in tiles
// of 32, which lie in one page. The layout of operands is that of mma.m16n8k16: lane 4g + t has rows g and g + 8, and columns 2t and 2t + 1 of eight.
const int TILE = 32;
const int QUERIES = 64;

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
    auto look = [&](float x, int i) {
        broken |= !(x < -NEGATIVE_INFINITY);
        if (x > best) best = x, at = i;
    };
    const int N = Pack<T>::N;
    // Whole packs, where rows begin with one.
    int packed = vocab % N ? 0 : known / N * N;
#pragma unroll 4
    for (int i = threadIdx.x * N; i < packed; i += blockDim.x * N) {
        float x[N];
        load(row + i, x);
#pragma unroll
        for (int j = 0; j < N; j++) look(x[j], i + j);
    }
    for (int i = packed + threadIdx.x; i < known; i += blockDim.x) look(to_f32(row[i]), i);
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

#define DECODE(T, NAME, L, WARPS, KIND)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                           \
        decode_##KIND##_##NAME(const T *qkv, T *cache, const u32 *table, const u32 *slot, const u32 *start,               \
                            const u32 *count, const float *sinks, const float *angles, float *parts, T *o, int blocks, \
                            int page, int heads, int kv_heads, int window, int table_rows, int turned, int own,        \
                            float scale) {                                                                             \
        attend<T, L, WARPS>(qkv, cache, table, slot, start, count, sinks, angles, parts, o,                                \
                        {blocks, page, heads, kv_heads, window}, table_rows, turned, own, scale);                      \
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
    DECODE(T, NAME, 8, 8, 8)                                                                                           \
    DECODE(T, NAME, 8, 16, few_8)                                                                                      \
    DECODE(T, NAME, 16, 8, 16)                                                                                         \
    PREFILL(T, NAME, 8)                                                                                                \
    PREFILL(T, NAME, 16)                                                                                               \
    extern "C" __global__ void decode_merge_##NAME(const float *parts, const u32 *count, const float *sinks, T *o,     \
                                                   int heads, int shares, int e) {                                     \
        merge<T>(parts, count, sinks, o, heads, shares, e);                                                            \
    }
DECODES(bf16, bf16)
DECODES(f16, f16)
ARGMAX(float, f32)
ARGMAX(bf16, bf16)
ARGMAX(f16, f16)
