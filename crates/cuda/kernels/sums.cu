// Shares become sums, sums become other sums.

// out[i] (+)= Σ over shares of shares[s][i], in order; a block has 32 columns and 32 lines of threads. There may be three sums, one
// after the other: line y of the grid has the y-th. `how`: the kind of accumulator, 4 more where it is added to.
extern "C" __global__ void __launch_bounds__(1024)
    add_shares(const float *shares, void *out_0, int how_0, void *out_1, int how_1, void *out_2, int how_2, i64 count,
               int d) {
    __shared__ float part[32][33];
    void *out = blockIdx.y == 0 ? out_0 : blockIdx.y == 1 ? out_1 : out_2;
    int how = blockIdx.y == 0 ? how_0 : blockIdx.y == 1 ? how_1 : how_2;
    shares += blockIdx.y * count * d;
    int column = threadIdx.x & 31, line = threadIdx.x >> 5;
    i64 i = (i64)blockIdx.x * 32 + column;
    float sum = 0.0f;
    if (i < d) {
#pragma unroll 8
        for (i64 s = line; s < count; s += 32) sum += shares[s * d + i];
    }
    part[line][column] = sum;
    __syncthreads();
    // A warp adds up a column.
    sum = warp_sum(part[column][line]);
    i = (i64)blockIdx.x * 32 + line;
    if (column == 0 && i < d) sum_write(out, how & 3, i, sum, how >> 2);
}

// out (+)= x, of one kind of accumulator.
extern "C" __global__ void accumulate(const void *x, void *out, int kind, int add, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (kind == SUM_FIXED) {
        i64 y = ((const i64 *)x)[i];
        i64 *at = (i64 *)out + i;
        *at = add ? fixed_merge(*at, y) : y;
    } else {
        sum_write(out, kind, i, sum_read(x, kind, i), add);
    }
}

// out = a + b, of one kind of accumulator.
extern "C" __global__ void add_state(const void *a, const void *b, void *out, int kind, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (kind == SUM_FIXED) {
        ((i64 *)out)[i] = fixed_merge(((const i64 *)a)[i], ((const i64 *)b)[i]);
    } else {
        sum_write(out, kind, i, sum_read(a, kind, i) + sum_read(b, kind, i), 0);
    }
}

// out (+)= x, from f32.
extern "C" __global__ void sum_f32(const float *x, void *out, int kind, int add, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum_write(out, kind, i, x[i], add);
}
