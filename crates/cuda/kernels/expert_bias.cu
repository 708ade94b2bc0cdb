// Biases of experts: of every row that of its expert, and their gradients. Rows of an expert, in their order, are those of `experts.cu`.

// y = x + bias[expert]; a row of no expert stays as it is. Of `of_experts` to each part, which has `of_part` rows. Grid: (columns, rows), of
// which the first is row `first`. In place where they are the same.
template <typename T>
static __device__ void grouped_bias(const T *x, const T *bias, const u32 *chosen, T *y, int first, int of_part,
                                    int of_experts, int n, int wide) {
    i64 row = first + (i64)blockIdx.y;
    u32 expert = chosen[row];
    bool has = expert < (u32)of_experts;
    bias += has ? (row / of_part * of_experts + expert) * n : 0;
    x += row * n;
    y += row * n;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i >= n) return;
        float v[N], more[N];
        load(x + i, v);
        load(bias + i, more);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = has ? v[j] + more[j] : v[j];
        store(y + i, v);
    } else if (i < n) {
        y[i] = has ? Of<T>::f32(to_f32(x[i]) + to_f32(bias[i])) : x[i];
    }
}

// out[e, i] (+)= Σ dy[r, i] over the rows of expert e; sums in fixed point take a sequence's rows at a time. A block has 32 columns of an
// expert and 32 lines of threads. Grid: (columns ÷ 32, experts).
template <typename T>
static __device__ void grouped_bias_grad(const T *dy, const int *order, const int *starts, void *out, int experts, int n,
                                         int kind, int add, int of_sequence) {
    __shared__ float part[32][33];
    int e = blockIdx.y, column = threadIdx.x & 31, line = threadIdx.x >> 5;
    int at = starts[e], end = at + starts[experts + 1 + e];
    i64 i = (i64)blockIdx.x * 32 + column;
    do {
        int next = end;
        if (kind == SUM_FIXED && at < end) {
            int sequence = order[at] / of_sequence;
            for (next = at + 1; next < end && order[next] / of_sequence == sequence;) next++;
        }
        float sum = 0.0f;
        if (i < n)
            for (int r = at + line; r < next; r += 32) sum += to_f32(dy[(i64)order[r] * n + i]);
        __syncthreads();
        part[line][column] = sum;
        __syncthreads();
        // A warp adds up a column.
        sum = warp_sum(part[column][line]);
        i64 to = (i64)blockIdx.x * 32 + line;
        if (column == 0 && to < n) sum_write(out, kind, (i64)e * n + to, sum, add);
        add = 1;
        at = next;
    } while (at < end);
}

#define EXPERT_BIAS(T, NAME)                                                                                           \
    extern "C" __global__ void grouped_bias_##NAME(const T *x, const T *bias, const u32 *chosen, T *y, int first,      \
                                                   int of_part, int of_experts, int n, int wide) {                     \
        grouped_bias<T>(x, bias, chosen, y, first, of_part, of_experts, n, wide);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        grouped_bias_grad_##NAME(const T *dy, const int *order, const int *starts, void *out, int experts, int n,      \
                                 int kind, int add, int of_sequence) {                                                 \
        grouped_bias_grad<T>(dy, order, starts, out, experts, n, kind, add, of_sequence);                              \
    }
EXPERT_BIAS(float, f32)
EXPERT_BIAS(bf16, bf16)
EXPERT_BIAS(f16, f16)
