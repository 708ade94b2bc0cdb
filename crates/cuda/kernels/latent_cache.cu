// Latent attention of new positions over the pages of a cache [pages, page, e]. All heads share one key, which is all that a position has there; its value is the last v
// elements of it. qkv [batch, seq, (heads + 1) · e]; new keys are in the cache already.

struct Latents {
    int blocks, page, heads, e, v, window;

    // The first position that the one at `last` sees.
    __device__ __forceinline__ int first(int last) const { return last - window + 1 > 0 ? last - window + 1 : 0; }
    __device__ __forceinline__ i64 row(const u32 *pages, int key) const { return (i64)pages[key / page] * page + key % page; }
};

// By the matrix units: a block has 16 heads of a position, and reads every key once for all of them. Tiles of 32 keys lie in one page. A warp makes the scores of 8 keys of
// a tile, and then sums a quarter of the columns of V. Of long texts several blocks have a share of the tiles each, and `decode_merge` merges their parts of the softmax:
// so where there are as many shares, the bits of a text do not depend on the texts beside it. The layout of operands is that of `prefill` in paged.cu.
const int TILE = 32;
const int GROUP = 16;
// Elements after each row in shared memory, so that rows start at different banks.
const int PAD = 8;
const int MOST_VALUES = 512;

// Grid: (groups of heads, positions, texts · shares).
template <typename T>
static __device__ __forceinline__ void attend(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start, const u32 *count,
                                              const float *sinks, float *parts, T *o, Latents n, int seq, int shares, float scale) {
    extern __shared__ uint4 raw[];
    __shared__ float scores[GROUP][TILE + 4];
    int width = n.e + PAD, packs = n.e / 8;
    T *query = (T *)raw, *keys = query + GROUP * width;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int h0 = blockIdx.x * GROUP, heads = min(GROUP, n.heads - h0), s = blockIdx.y, share = blockIdx.z % shares;
    i64 b = blockIdx.z / shares, head = (b * seq + s) * n.heads + h0;
    if (s >= (int)count[b]) {
        for (int i = threadIdx.x; shares == 1 && i < heads * n.v; i += blockDim.x) o[head * n.v + i] = Of<T>::f32(0.0f);
        return;
    }
    int last = start[b] + s, first = n.first(last), columns = n.v / 4;
    const u32 *pages = table + (i64)slot[b] * n.blocks;
    const T *row = qkv + (b * seq + s) * (n.heads + 1) * n.e + (i64)h0 * n.e;
    for (int i = threadIdx.x; i < GROUP * packs; i += blockDim.x) {
        int h = i / packs, at = i % packs * 8;
        copy16(query + h * width + at, row + (h < heads ? h : 0) * n.e + at, h < heads);
    }
    float out[MOST_VALUES / 32][4] = {}, top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int k0 = first / TILE * TILE + TILE * share; k0 <= last; k0 += TILE * shares) {
        const T *rows = cache + n.row(pages, k0) * n.e;
        for (int i = threadIdx.x; i < TILE * packs; i += blockDim.x) {
            int key = i / packs, at = i % packs * 8;
            bool there = k0 + key <= last;
            copy16(keys + key * width + at, rows + (i64)(there ? key : 0) * n.e + at, there);
        }
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        float score[4] = {};
        for (int k = 0; k < n.e; k += 16) {
            u32 a[4];
            matrices(a, query + lane % 16 * width + k + lane / 16 * 8);
            const T *key = keys + (8 * warp + g) * width + k + 2 * t;
            units<T>(score, a[0], a[1], a[2], a[3], *(const u32 *)key, *(const u32 *)(key + 8));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = 8 * warp + 2 * t + (i & 1), key = k0 + column;
            scores[g + 8 * (i >> 1)][column] = key >= first && key <= last ? score[i] * scale : NEGATIVE_INFINITY;
        }
        __syncthreads();
        // Every warp needs the weights of all keys.
        u32 p[TILE / 8][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *own = scores[g + 8 * i];
            float most = top[i];
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) most = fmaxf(most, fmaxf(own[8 * j + 2 * t], own[8 * j + 2 * t + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            float from = most == NEGATIVE_INFINITY ? 0.0f : most, less = __expf(top[i] - from);
            top[i] = most;
            sum[i] *= less;
#pragma unroll
            for (int j = 0; j < MOST_VALUES / 32; j++) out[j][2 * i] *= less, out[j][2 * i + 1] *= less;
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
                float x = __expf(own[8 * j + 2 * t] - from), y = __expf(own[8 * j + 2 * t + 1] - from);
                sum[i] += x + y;
                p[j][i] = Of<T>::two(x, y);
            }
        }
        const T *values = keys + n.e - n.v + warp * columns;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
#pragma unroll
            for (int j = 0; j < MOST_VALUES / 32; j += 2) {
                if (8 * j >= columns) continue;
                u32 r[4];
                int matrix = lane / 8;
                transposed(r, values + (16 * k + (matrix & 1) * 8 + lane % 8) * width + (j + (matrix >> 1)) * 8);
                units<T>(out[j], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], r[0], r[1]);
                units<T>(out[j + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], r[2], r[3]);
            }
        }
        __syncthreads();
    }
    asm volatile("cp.async.wait_all;");
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int of = g + 8 * i;
        sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
        sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        if (of >= heads) continue;
        if (shares > 1) {
            float *part = parts + ((head + of) * shares + share) * (n.v + 2);
            if (!warp && !t) part[0] = top[i], part[1] = sum[i];
            part += 2 + warp * columns + 2 * t;
#pragma unroll
            for (int j = 0; j < MOST_VALUES / 32; j++)
                if (8 * j < columns) part[8 * j] = out[j][2 * i], part[8 * j + 1] = out[j][2 * i + 1];
            continue;
        }
        // A sink counts in the denominator alone.
        float by = 1.0f / (sinks ? sum[i] + __expf(sinks[h0 + of] - top[i]) : sum[i]);
        T *to = o + (head + of) * n.v + warp * columns + 2 * t;
#pragma unroll
        for (int j = 0; j < MOST_VALUES / 32; j++)
            if (8 * j < columns) *(u32 *)(to + 8 * j) = Of<T>::two(out[j][2 * i] * by, out[j][2 * i + 1] * by);
    }
}

// The same for any sizes and in f32: a warp has a head of a position, and a lane elements lane, lane + 32, … of it. Grid: (positions ÷ warps, heads, texts).
const int MOST_PER_LANE = 32;

template <typename T>
static __device__ __forceinline__ void plain(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start, const u32 *count,
                                             const float *sinks, T *o, Latents n, int seq, float scale) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, h = blockIdx.y;
    i64 b = blockIdx.z, row = b * seq + s;
    if (s >= seq) return;
    float q[MOST_PER_LANE], k[MOST_PER_LANE], out[MOST_PER_LANE], top = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) {
        int i = c * 32 + lane;
        q[c] = i < n.e ? to_f32(qkv[row * (n.heads + 1) * n.e + (i64)h * n.e + i]) : 0.0f;
        out[c] = 0.0f;
    }
    int last = s < (int)count[b] ? (int)start[b] + s : -1;
    const u32 *pages = table + (i64)slot[b] * n.blocks;
    for (int key = n.first(last); key <= last; key++) {
        const T *at = cache + n.row(pages, key) * n.e;
        float score = 0.0f;
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) {
            int i = c * 32 + lane;
            k[c] = i < n.e ? to_f32(at[i]) : 0.0f;
            score += q[c] * k[c];
        }
        score = warp_sum(score) * scale;
        float most = fmaxf(top, score), less = __expf(top - most), p = __expf(score - most);
        top = most, sum = sum * less + p;
#pragma unroll
        for (int c = 0; c < MOST_PER_LANE; c++) out[c] = out[c] * less + p * k[c];
    }
    float by = sum > 0.0f ? 1.0f / (sinks ? sum + __expf(sinks[h] - top) : sum) : 0.0f;
#pragma unroll
    for (int c = 0; c < MOST_PER_LANE; c++) {
        int i = c * 32 + lane - (n.e - n.v);
        if (i >= 0 && i < n.v) o[(row * n.heads + h) * n.v + i] = Of<T>::f32(out[c] * by);
    }
}

#define PLAIN(T, NAME)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        plain_##NAME(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start,                \
                     const u32 *count, const float *sinks, T *o, int blocks, int page, int heads, int e, int v,        \
                     int window, int seq, float scale) {                                                               \
        plain<T>(qkv, cache, table, slot, start, count, sinks, o, {blocks, page, heads, e, v, window}, seq, scale);    \
    }
#define ATTEND(T, NAME)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        attend_##NAME(const T *qkv, const T *cache, const u32 *table, const u32 *slot, const u32 *start,               \
                      const u32 *count, const float *sinks, float *parts, T *o, int blocks, int page, int heads,       \
                      int e, int v, int window, int seq, int shares, float scale) {                                    \
        attend<T>(qkv, cache, table, slot, start, count, sinks, parts, o, {blocks, page, heads, e, v, window}, seq,    \
                  shares, scale);                                                                                      \
    }
PLAIN(float, f32)
PLAIN(bf16, bf16)
PLAIN(f16, f16)
ATTEND(bf16, bf16)
ATTEND(f16, f16)
