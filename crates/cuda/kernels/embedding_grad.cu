// The gradient of an embedding, the same bits every time: positions are ordered by token, then by place, and each row of the
// table adds up its own in that order.

// How many positions before each one have its token, and how often each token of this part occurs.
extern "C" __global__ void token_ranks(const u32 *tokens, u32 *ranks, u32 *counts, int n, int first, int entries) {
    __shared__ u32 tile[256];
    int p = blockIdx.x * 256 + threadIdx.x;
    u32 mine = p < n ? tokens[p] : ~0u;
    u32 rank = 0;
    for (int base = 0; base <= (int)(blockIdx.x * 256); base += 256) {
        __syncthreads();
        tile[threadIdx.x] = base + (int)threadIdx.x < n ? tokens[base + threadIdx.x] : ~0u;
        __syncthreads();
        int end = base + 256 <= p ? 256 : p - base;
        if (end == 256) {
#pragma unroll 16
            for (int i = 0; i < 256; i++) rank += tile[i] == mine;
        } else {
            for (int i = 0; i < end; i++) rank += tile[i] == mine;
        }
    }
    if (p >= n) return;
    ranks[p] = rank;
    i64 token = (i64)mine - first;
    if (token >= 0 && token < entries) atomicAdd(counts + token, 1u);
}

// offsets[t] = Σ counts before t; one block of 1024 threads.
extern "C" __global__ void token_offsets(const u32 *counts, u32 *offsets, int entries) {
    __shared__ u32 sums[32];
    __shared__ u32 carry;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) carry = 0;
    for (int base = 0; base < entries; base += 1024) {
        int i = base + threadIdx.x;
        u32 x = i < entries ? counts[i] : 0, sum = x;
        for (int step = 1; step < 32; step <<= 1) {
            u32 y = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += y;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        if (warp == 0) {
            u32 all = sums[lane];
            for (int step = 1; step < 32; step <<= 1) {
                u32 y = __shfl_up_sync(~0u, all, step);
                if (lane >= step) all += y;
            }
            sums[lane] = all;
        }
        __syncthreads();
        u32 before = carry + (warp ? sums[warp - 1] : 0) + sum - x;
        if (i < entries) offsets[i] = before;
        __syncthreads();
        if (threadIdx.x == 1023) carry = before + x;
        __syncthreads();
    }
}

extern "C" __global__ void token_order(const u32 *tokens, const u32 *ranks, const u32 *offsets, u32 *order, int n,
                                       int first, int entries) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= n) return;
    i64 token = (i64)tokens[p] - first;
    if (token >= 0 && token < entries) order[offsets[token] + ranks[p]] = p;
}

// One block per row of the table and 1024 columns.
template <typename T>
static __device__ void embedding_grad(const T *dy, const u32 *order, const u32 *offsets, const u32 *counts, void *out,
                                      int kind, int add, int d) {
    i64 token = blockIdx.x;
    u32 count = counts[token], from = offsets[token];
    if (count == 0 && add) return;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        if (kind == SUM_FIXED) {
            i64 sum = add ? ((i64 *)out)[token * d + i] : 0;
            for (u32 c = 0; c < count; c++) sum = fixed_merge(sum, fixed_of(to_f32(dy[(i64)order[from + c] * d + i])));
            ((i64 *)out)[token * d + i] = sum;
        } else {
            float sum = 0.0f;
#pragma unroll 8
            for (u32 c = 0; c < count; c++) sum += to_f32(dy[(i64)order[from + c] * d + i]);
            sum_write(out, kind, token * d + i, sum, add);
        }
    }
}

#define EMBEDDING_GRAD(T, NAME)                                                                                        \
    extern "C" __global__ void embedding_grad_##NAME(const T *dy, const u32 *order, const u32 *offsets,                \
                                                     const u32 *counts, void *out, int kind, int add, int d) {         \
        embedding_grad<T>(dy, order, offsets, counts, out, kind, add, d);                                              \
    }
EMBEDDING_GRAD(float, f32)
EMBEDDING_GRAD(bf16, bf16)
EMBEDDING_GRAD(f16, f16)
