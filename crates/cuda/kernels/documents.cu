// Documents as entries of a batch: where each starts and how long it is, from where each position's document starts.

// Whether a document starts at a position.
static __device__ __forceinline__ bool starts_here(const u32 *starts, i64 at, int seq) { return starts[at] >= (u32)(at % seq); }

// offsets: three arrays of bound + 1, `apart` elements from each other, in elements of rows of this many; lengths: bound. The host
// knows that there are at most `bound` documents. Entries after the last are empty. Grid: positions ÷ 1024, blocks of 1024.
extern "C" __global__ void document_table(const u32 *starts, i64 *offsets, u32 *lengths, int tokens, int seq, int bound,
                                          i64 apart, i64 row0, i64 row1, i64 row2) {
    __shared__ int counts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int first = blockIdx.x * 1024, here = first + threadIdx.x;
    // Documents that start before this block.
    int before = 0;
    for (int i = threadIdx.x; i < first; i += 1024) before += starts_here(starts, i, seq);
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) counts[warp] = before;
    __syncthreads();
    before = __reduce_add_sync(~0u, counts[lane]);
    __syncthreads();
    // And before this position, itself included.
    u32 marks = __ballot_sync(~0u, here < tokens && starts_here(starts, here, seq));
    if (lane == 0) counts[warp] = __popc(marks);
    __syncthreads();
    int own = counts[lane], up_to = before + __popc(marks & (~0u >> (31 - lane)));
    up_to += __reduce_add_sync(~0u, lane < warp ? own : 0);
    int total = before + __reduce_add_sync(~0u, own);
    i64 rows[3] = {row0, row1, row2};
    bool ends = here < tokens && (here + 1 == tokens || starts_here(starts, here + 1, seq));
    if (ends && up_to <= bound) {
        u32 position = here % seq, start = starts[here] < position ? starts[here] : position;
        i64 token = here - (int)(position - start);
        for (int k = 0; k < 3; k++) offsets[k * apart + up_to - 1] = token * rows[k];
        lengths[up_to - 1] = position - start + 1;
    }
    if (blockIdx.x + 1 < gridDim.x) return;
    for (int i = total + threadIdx.x; i <= bound; i += 1024) {
        for (int k = 0; k < 3; k++) offsets[k * apart + i] = tokens * rows[k];
        if (i < bound) lengths[i] = 0;
    }
}

// Statistics head by head [batch, heads, seq] from those position by position [batch, seq, heads], or the other way round.
// Grid: (positions ÷ 32, heads ÷ 32, batch), blocks of 256.
extern "C" __global__ void transpose_statistics(const float *from, float *to, int rows, int columns) {
    __shared__ float tile[32][33];
    int x = threadIdx.x & 31, row = blockIdx.x * 32, column = blockIdx.y * 32;
    i64 base = (i64)blockIdx.z * rows * columns;
    for (int y = threadIdx.x >> 5; y < 32; y += 8)
        if (row + y < rows && column + x < columns) tile[y][x] = from[base + (i64)(row + y) * columns + column + x];
    __syncthreads();
    for (int y = threadIdx.x >> 5; y < 32; y += 8)
        if (column + y < columns && row + x < rows) to[base + (i64)(column + y) * rows + row + x] = tile[x][y];
}

// Heads of packed rows, `count` packs of 16 bytes from `first` on, `e` each, into rows of as many heads as queries have: key heads
// as often as queries share them.
extern "C" __global__ void repeat_heads(const Pack<u16> *from, Pack<u16> *to, i64 packs, int e, int count, int heads, int first,
                                        int width) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    int at = i % heads, head = at / e / (heads / count);
    to[i] = from[i / heads * width + first + head * e + at % e];
}

// The other way round: what queries that share a head have of it is added up.
template <typename T>
static __device__ void sum_heads(const Pack<T> *from, Pack<T> *to, i64 packs, int e, int count, int heads, int first, int width) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    int at = i % count, group = heads / count;
    i64 row = i / count;
    float sum[8] = {};
    for (int k = 0; k < group; k++) {
        float x[8];
        unpack(from[row * heads + (at / e * group + k) * e + at % e], x);
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    pack(sum, to[row * width + first + at]);
}

#define SUM_HEADS(T, NAME)                                                                                             \
    extern "C" __global__ void sum_heads_##NAME(const Pack<T> *from, Pack<T> *to, i64 packs, int e, int count,         \
                                                int heads, int first, int width) {                                     \
        sum_heads<T>(from, to, packs, e, count, heads, first, width);                                                  \
    }
SUM_HEADS(bf16, bf16)
SUM_HEADS(f16, f16)
