// Cross-entropy over rows of logits, one block of up to 1024 threads per row.

// The target of a position whose loss does not count: no loss, no gradient.
#define IGNORED_TARGET 0xffffffffu

// The largest of a row and the sum of exponentials below it, on every thread.
template <typename T>
static __device__ void maximum_and_sum(const T *x, int n, int wide, float &max, float &sum) {
    __shared__ float maxima[32], sums[32];
    const int N = Pack<T>::N;
    float m = NEGATIVE_INFINITY, s = 0.0f;
    if (wide) {
        for (int i = threadIdx.x * N; i < n; i += blockDim.x * N) {
            float v[N];
            load(x + i, v);
            if (i + N > n)
                for (int j = 0; j < N; j++) v[j] = i + j < n ? v[j] : NEGATIVE_INFINITY;
            float top = v[0];
#pragma unroll
            for (int j = 1; j < N; j++) top = fmaxf(top, v[j]);
            if (top > m) {
                s *= __expf(m - top);
                m = top;
            }
            if (m == NEGATIVE_INFINITY) continue;
#pragma unroll
            for (int j = 0; j < N; j++) s += __expf(v[j] - m);
        }
    } else {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            float v = to_f32(x[i]);
            if (v > m) {
                s *= __expf(m - v);
                m = v;
            }
            if (m != NEGATIVE_INFINITY || v != v) s += __expf(v - m);
        }
    }
    float top = warp_max(m);
    s = warp_sum(m == NEGATIVE_INFINITY && s == 0.0f ? 0.0f : s * __expf(m - top));
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();
    if (lane == 0) {
        maxima[warp] = top;
        sums[warp] = s;
    }
    __syncthreads();
    m = lane < warps ? maxima[lane] : NEGATIVE_INFINITY;
    s = lane < warps ? sums[lane] : 0.0f;
    max = warp_max(m);
    sum = warp_sum(m == NEGATIVE_INFINITY && s == 0.0f ? 0.0f : s * __expf(m - max));
}

// Rows are `stride` elements apart. Losses of rows, and dlogits in place of the logits or elsewhere; `lse` and `out` may be null.
template <typename T>
static __device__ void cross_entropy(const T *logits, const u32 *targets, float *losses, float *lse, T *out,
                                     const float *scale, int v, int stride, int wide) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    const T *x = logits + row * stride;
    float max, sum;
    maximum_and_sum(x, v, wide, max, sum);
    float log_sum = max + logf(sum);
    int target = targets[row] < (u32)v ? targets[row] : v - 1;
    float hit = to_f32(x[target]);
    __syncthreads();
    if (threadIdx.x == 0) {
        losses[row] = targets[row] == IGNORED_TARGET ? 0.0f : log_sum - hit;
        if (lse) lse[row] = log_sum;
    }
    if (!out) return;
    float seed = targets[row] == IGNORED_TARGET ? 0.0f : scale ? *scale : 1.0f;
    T *y = out + row * stride;
    if (wide) {
        for (int i = threadIdx.x * N; i < v; i += blockDim.x * N) {
            float p[N];
            load(x + i, p);
#pragma unroll
            for (int j = 0; j < N; j++) p[j] = seed * (__expf(p[j] - log_sum) - (i + j == target ? 1.0f : 0.0f));
            store(y + i, p);
        }
    } else {
        for (int i = threadIdx.x; i < v; i += blockDim.x)
            y[i] = Of<T>::f32(seed * (__expf(to_f32(x[i]) - log_sum) - (i == target ? 1.0f : 0.0f)));
    }
}

// dlogits from known log-sum-exps.
template <typename T>
static __device__ void cross_entropy_grad(const T *logits, const u32 *targets, const float *lse, T *out, int v,
                                          float weight) {
    i64 row = blockIdx.x;
    int target = targets[row] < (u32)v ? targets[row] : v - 1;
    float seed = targets[row] == IGNORED_TARGET ? 0.0f : weight;
    for (int i = threadIdx.x; i < v; i += blockDim.x)
        out[row * v + i] =
            Of<T>::f32(seed * (__expf(to_f32(logits[row * v + i]) - lse[row]) - (i == target ? 1.0f : 0.0f)));
}

// Whether greedy decoding takes one of n logits before one of this size, which has this many of them before it; on every thread.
template <typename T>
static __device__ bool is_beaten(const T *x, int n, float hit, i64 before) {
    int beaten = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float y = to_f32(x[i]);
        beaten |= y > hit || (y == hit && i < before);
    }
    return __syncthreads_or(beaten);
}

// Of each row, 1 where greedy decoding misses the target.
template <typename T>
static __device__ void misses(const T *logits, const u32 *targets, float *out, int v, int stride) {
    i64 row = blockIdx.x;
    const T *x = logits + row * stride;
    int target = targets[row] < (u32)v ? targets[row] : v - 1;
    bool beaten = is_beaten(x, v, to_f32(x[target]), target);
    if (threadIdx.x == 0) out[row] = beaten && targets[row] != IGNORED_TARGET ? 1.0f : 0.0f;
}

// Of each sequence, the sum of its rows' losses, in order.
extern "C" __global__ void sum_losses(const float *losses, double *out, int seq) {
    __shared__ double part[256];
    i64 b = blockIdx.x;
    double sum = 0.0;
    for (int i = threadIdx.x; i < seq; i += 256) sum += (double)losses[b * seq + i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 128; step; step >>= 1) {
        if ((int)threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[b] = part[0];
}

// Of each row of a part of the vocabulary: largest logit, sum of exponentials below it, the target's logit. Padding becomes −∞.
extern "C" __global__ void vocab_statistics(float *logits, const u32 *targets, float *statistics, int v, int first,
                                            int entries) {
    i64 row = blockIdx.x;
    float *x = logits + row * v;
    float max, sum;
    maximum_and_sum(x, entries, 0, max, sum);
    for (int i = entries + threadIdx.x; i < v; i += blockDim.x) x[i] = NEGATIVE_INFINITY;
    if (threadIdx.x) return;
    i64 target = (i64)targets[row] - first;
    statistics[row * 3] = max;
    statistics[row * 3 + 1] = sum;
    statistics[row * 3 + 2] = target >= 0 && target < entries ? x[target] : NEGATIVE_INFINITY;
}

// The log-sum-exp of a position over all parts, and its target's logit.
static __device__ void combine(const float *statistics, int parts, i64 rows, i64 row, float &lse, float &target) {
    float max = NEGATIVE_INFINITY, sum = 0.0f;
    target = NEGATIVE_INFINITY;
    for (int a = 0; a < parts; a++) {
        const float *s = statistics + (a * rows + row) * 3;
        max = s[0] > max ? s[0] : max;
        target = s[2] > target ? s[2] : target;
    }
    for (int a = 0; a < parts; a++) {
        const float *s = statistics + (a * rows + row) * 3;
        if (s[1] != 0.0f) sum += s[1] * __expf(s[0] - max);
    }
    lse = max + logf(sum);
}

extern "C" __global__ void vocab_losses(const float *statistics, const u32 *targets, float *losses, int parts,
                                        i64 rows) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float lse, target;
    combine(statistics, parts, rows, row, lse, target);
    losses[row] = targets[row] == IGNORED_TARGET ? 0.0f : lse - target;
}

// Of each row, 1 where this part of the vocabulary has a token that greedy decoding takes before the target.
extern "C" __global__ void vocab_misses(const float *logits, const float *statistics, const u32 *targets, float *out,
                                        int parts, int v, int first, int entries) {
    i64 row = blockIdx.x;
    float lse, hit;
    combine(statistics, parts, gridDim.x, row, lse, hit);
    bool beaten = is_beaten(logits + row * v, entries, hit, (i64)targets[row] - first);
    if (threadIdx.x == 0) out[row] = beaten && targets[row] != IGNORED_TARGET ? 1.0f : 0.0f;
}

template <typename T>
static __device__ void vocab_grad(const float *logits, const float *statistics, const u32 *targets, T *out,
                                  const float *scale, int parts, int v, int first, int entries) {
    i64 row = blockIdx.x;
    float seed = targets[row] == IGNORED_TARGET ? 0.0f : scale ? *scale : 1.0f;
    float lse, hit;
    combine(statistics, parts, gridDim.x, row, lse, hit);
    i64 target = (i64)targets[row] - first;
    if (target >= entries) target = -1;
    for (int i = threadIdx.x; i < v; i += blockDim.x)
        out[row * v + i] = Of<T>::f32(seed * (__expf(logits[row * v + i] - lse) - (i == target ? 1.0f : 0.0f)));
}

#define LOSS(T, NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        cross_entropy_##NAME(const T *logits, const u32 *targets, float *losses, float *lse, T *out,                   \
                             const float *scale, int v, int stride, int wide) {                                        \
        cross_entropy<T>(logits, targets, losses, lse, out, scale, v, stride, wide);                                   \
    }                                                                                                                  \
    extern "C" __global__ void cross_entropy_grad_##NAME(const T *logits, const u32 *targets, const float *lse,        \
                                                         T *out, int v, float weight) {                                \
        cross_entropy_grad<T>(logits, targets, lse, out, v, weight);                                                   \
    }                                                                                                                  \
    extern "C" __global__ void misses_##NAME(const T *logits, const u32 *targets, float *out, int v, int stride) {         \
        misses<T>(logits, targets, out, v, stride);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void vocab_grad_##NAME(const float *logits, const float *statistics, const u32 *targets,     \
                                                 T *out, const float *scale, int parts, int v, int first,              \
                                                 int entries) {                                                        \
        vocab_grad<T>(logits, statistics, targets, out, scale, parts, v, first, entries);                              \
    }
LOSS(float, f32)
LOSS(bf16, bf16)
LOSS(f16, f16)
