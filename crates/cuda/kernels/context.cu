// Attention over parts of the keys: results are merged by log-sum-exp, gradients added. What a library made of a block of rows, one after
// the other, goes to its place in rows of all.

// Grid: (positions ÷ warps, heads, batch); one warp per row. `other` has rows `first` to `first` + `count` only. Where `fresh`, there is
// nothing to merge it with, and rows that it does not have become those of queries that saw no key. In place where they are the same.
template <typename O, typename P>
static __device__ void merge(const O *o, const float *lse, const P *other, const float *other_lse, O *to, float *to_lse,
                             int seq, int heads, int e, int first, int count, int fresh) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y, lane = threadIdx.x & 31;
    i64 b = blockIdx.z;
    bool has = s >= first && s < first + count;
    if (s >= seq || (!has && !fresh)) return;
    i64 at = ((b * seq + s) * heads + h) * e, statistic = (b * heads + h) * seq + s;
    i64 other_at = ((b * count + s - first) * heads + h) * e;
    float x = fresh ? NEGATIVE_INFINITY : lse[statistic];
    float y = has ? other_lse[(b * heads + h) * count + s - first] : NEGATIVE_INFINITY;
    float top = x > y ? x : y, base = top == NEGATIVE_INFINITY ? 0.0f : top;
    float weight = expf(x - base), other_weight = expf(y - base), sum = weight + other_weight;
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int i = lane; to && i < e; i += 32) {
        float before = weight == 0.0f ? 0.0f : to_f32(o[at + i]) * weight;
        float more = other_weight == 0.0f ? 0.0f : to_f32(other[other_at + i]) * other_weight;
        to[at + i] = Of<O>::f32((before + more) * inverse);
    }
    __syncwarp();
    if (to_lse && lane == 0) to_lse[statistic] = top + logf(sum);
}

#define MERGE(NAME, O, P)                                                                                              \
    extern "C" __global__ void merge_##NAME(const O *o, const float *lse, const P *other, const float *other_lse, O *to, \
                                            float *to_lse, int seq, int heads, int e, int first, int count, int fresh) { \
        merge<O, P>(o, lse, other, other_lse, to, to_lse, seq, heads, e, first, count, fresh);                         \
    }
MERGE(f32, float, float)
MERGE(bf16_to_f32, float, bf16)
MERGE(bf16, bf16, bf16)
MERGE(f16_to_f32, float, f16)
MERGE(f16, f16, f16)

// Grid: (rows, batch). Rows that the block does not have are zero where `fresh`.
template <typename O, typename P>
static __device__ void add_block(O *to, const P *block, int rows, int width, int first, int count, int fresh) {
    int s = blockIdx.x;
    i64 b = blockIdx.y;
    bool has = s >= first && s < first + count;
    if (!has && !fresh) return;
    O *row = to + (b * rows + s) * width;
    const P *from = block + (b * count + s - first) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float x = has ? to_f32(from[i]) : 0.0f;
        row[i] = Of<O>::f32(fresh ? x : to_f32(row[i]) + x);
    }
}

#define ADD_BLOCK(NAME, O, P)                                                                                          \
    extern "C" __global__ void add_block_##NAME(O *to, const P *block, int rows, int width, int first, int count,      \
                                                int fresh) {                                                           \
        add_block<O, P>(to, block, rows, width, first, count, fresh);                                                  \
    }
ADD_BLOCK(bf16_to_f32, float, bf16)
ADD_BLOCK(bf16, bf16, bf16)
ADD_BLOCK(f16_to_f32, float, f16)
ADD_BLOCK(f16, f16, f16)

// Log-sum-exps of rows `first` to `first` + `count`. Grid: (count ÷ threads, heads of all sequences).
extern "C" __global__ void block_statistics(const float *lse, float *to, int seq, int first, int count) {
    int s = blockIdx.x * blockDim.x + threadIdx.x;
    i64 head = blockIdx.y;
    if (s < count) to[head * count + s] = lse[head * seq + first + s];
}
