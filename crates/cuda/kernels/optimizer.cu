// The update: gradient norm as an exact integer, clipping, and the rules by which parameters move. Scalars: learning rate,
// 1 ÷ targets, clip, 1 − β₁ᵗ, 1 − β₂ᵗ, loss scale.

// A sum of squares is an integer in units of 2^-352, as lockstep_ir::squares has it: limbs of 32 bits in 64, the rest carries.
const int LIMBS = 21;
const int LOWEST = -352;

// A number touches three limbs. Numbers of one magnitude touch the same, so a thread keeps the limbs of the last in registers.
struct Window {
    int first;
    u64 part[3];

    __device__ __forceinline__ Window() : first(-1), part{0, 0, 0} {}

    __device__ __forceinline__ void flush(u64 *limbs) {
#pragma unroll
        for (int l = 0; l < 3; l++) {
            if (part[l]) atomicAdd(limbs + first + l, part[l]);
            part[l] = 0;
        }
    }

    // Adds a non-negative number. Returns whether it counts.
    __device__ __forceinline__ bool add(double x, u64 *limbs) {
        u64 bits = (u64)__double_as_longlong(x);
        if (!bits) return true;
        int exponent = (int)(bits >> 52);
        u64 mantissa = (bits & (((u64)1 << 52) - 1)) | (u64)(exponent > 0) << 52;
        int place = exponent - 1075 - LOWEST;
        if (place < 0) {
            mantissa = place > -64 ? mantissa >> -place : 0;
            place = 0;
        }
        int here = place / 32, shift = place % 32;
        if (here + 3 > LIMBS) return false;
        if (here != first) {
            if (first >= 0) flush(limbs);
            first = here;
        }
        u64 low = mantissa << shift;
        part[0] += low & 0xffffffffu;
        part[1] += low >> 32;
        part[2] += shift ? mantissa >> (64 - shift) : 0;
        return true;
    }
};

// The sums over 16 lanes of four numbers each, added in the order of one butterfly per number, with a third of its exchanges: lane l
// gets that of number l / 4 % 4.
static __device__ __forceinline__ double half_warp_sums(const double x[4]) {
    bool high = threadIdx.x & 8, odd = threadIdx.x & 4;
    double first = high ? x[2] : x[0], second = high ? x[3] : x[1];
    first += __shfl_xor_sync(~0u, high ? x[0] : x[2], 8);
    second += __shfl_xor_sync(~0u, high ? x[1] : x[3], 8);
    double sum = odd ? second : first;
    sum += __shfl_xor_sync(~0u, odd ? first : second, 4);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum + __shfl_xor_sync(~0u, sum, 1);
}

// totals: the limbs, and how often a number did not count. Blocks of 64 elements are added in f64 by 16 lanes, then as integers,
// which do not mind the order.
struct Squares {
    const void *grad;
    i64 n, tail;
};

// Elements of a block of threads.
const int SQUARES_CHUNK = 256 * 4 * 8;

template <typename G>
static __device__ void square_sum(const Many<Squares> &tensors, const float *scalars, u64 *totals, double share) {
    int tensor = tensors.find(blockIdx.x);
    const G *grad = (const G *)tensors.entries[tensor].grad;
    i64 tail = tensors.entries[tensor].tail;
    i64 start = (i64)(blockIdx.x - tensors.first_block[tensor]) * SQUARES_CHUNK;
    i64 n = tensors.entries[tensor].n;
    i64 end = start + SQUARES_CHUNK < n ? start + SQUARES_CHUNK : n;
    const int AT_ONCE = 4;
    __shared__ u64 limbs[LIMBS + 1];
    if (threadIdx.x <= LIMBS) limbs[threadIdx.x] = 0;
    __syncthreads();
    double inverse = (double)(scalars[1] / scalars[5]);
    Window window;
    bool sound = true;
    i64 stride = blockDim.x * 4;
    i64 whole = tail < n ? tail : n;
    for (i64 base = start; base < end; base += stride * AT_ONCE) {
        i64 here = base + threadIdx.x * 4;
        float g[AT_ONCE][4];
        double own[AT_ONCE], rest[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            i64 at = here + t * stride;
            if (at + 4 <= n) {
                load4(grad + at, g[t]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) g[t][j] = at + j < n ? to_f32(grad[at + j]) : 0.0f;
            }
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            i64 at = here + t * stride;
            own[t] = rest[t] = 0.0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                double x = (double)g[t][j] * inverse;
                if (at + j < whole)
                    own[t] += x * x;
                else
                    rest[t] += x * x;
            }
        }
        double sum = half_warp_sums(own), shared_sum = 0.0;
        if (__any_sync(~0u, here + (AT_ONCE - 1) * stride + 3 >= whole)) shared_sum = half_warp_sums(rest) * share;
        // Of each block of 64 elements one lane turns the sum into an integer.
        if ((threadIdx.x & 3) == 0) {
            sound = window.add(sum, limbs) && sound;
            sound = window.add(shared_sum, limbs) && sound;
        }
    }
    // The lanes of a warp mostly have one window: those that have the highest are added up first.
    int top = __reduce_max_sync(~0u, window.first);
    if (window.first >= 0 && window.first != top) window.flush(limbs);
#pragma unroll
    for (int l = 0; l < 3; l++) {
#pragma unroll
        for (int step = 16; step; step >>= 1) window.part[l] += __shfl_xor_sync(~0u, window.part[l], step);
    }
    window.first = top;
    if ((threadIdx.x & 31) == 0 && top >= 0) window.flush(limbs);
    if (!sound) atomicAdd(limbs + LIMBS, (u64)1);
    __syncthreads();
    if (threadIdx.x <= LIMBS && limbs[threadIdx.x]) atomicAdd(totals + threadIdx.x, limbs[threadIdx.x]);
}

#define SQUARE_SUM(G, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) square_sum_##NAME(                                               \
        const __grid_constant__ Many<Squares> tensors, const float *scalars, u64 *totals, double share) {              \
        square_sum<G>(tensors, scalars, totals, share);                                                                \
    }
SQUARE_SUM(float, f32)
SQUARE_SUM(bf16, bf16)
SQUARE_SUM(i64, fixed)

// Limbs below 2^32, all but the last.
static __device__ __forceinline__ void carry_limbs(u64 *limbs) {
    u64 carry = 0;
#pragma unroll
    for (int l = 0; l < LIMBS - 1; l++) {
        carry += limbs[l];
        limbs[l] = carry & 0xffffffffu;
        carry >>= 32;
    }
    limbs[LIMBS - 1] += carry;
}

extern "C" __global__ void square_sum_end(const u64 *totals, i64 *out) {
    u64 limbs[LIMBS];
#pragma unroll
    for (int l = 0; l < LIMBS; l++) limbs[l] = totals[l];
    bool sound = totals[LIMBS] == 0;
    carry_limbs(limbs);
#pragma unroll
    for (int l = 0; l < LIMBS; l++) out[l] = sound ? (i64)limbs[l] : POISON;
}

// out = Σ of sums, which stand one after the other in `sums` as addresses.
extern "C" __global__ void merge_sum(const i64 *x, i64 *out, int add) {
    int l = threadIdx.x;
    if (l < LIMBS) out[l] = add ? fixed_merge(out[l], x[l]) : x[l];
}

// The losses of a micro-batch, one thread: they are as many as its sequences.
extern "C" __global__ void loss_sum(const double *losses, i64 n, i64 *out) {
    u64 limbs[LIMBS] = {};
    bool sound = true;
    for (i64 i = 0; i < n; i++) {
        Window window;
        sound = window.add(losses[i] + 0.0, limbs) && sound;
        if (window.first >= 0) {
            for (int l = 0; l < 3; l++) limbs[window.first + l] += window.part[l];
        }
    }
    carry_limbs(limbs);
    for (int l = 0; l < LIMBS; l++) out[l] = sound ? (i64)limbs[l] : POISON;
}

// The number that the limbs of a sum make; NaN where something that was added did not count.
static __device__ __forceinline__ double sum_value(const i64 *sum) {
    u64 limbs[LIMBS];
    bool sound = true;
#pragma unroll
    for (int l = 0; l < LIMBS; l++) {
        sound = sound && sum[l] != POISON;
        limbs[l] = (u64)sum[l];
    }
    // Sums over ranks have carries; without them every way to the same integer gives the same bits.
    carry_limbs(limbs);
    double shrunk = 0.0;
#pragma unroll
    for (int l = 0; l < LIMBS; l++) shrunk = shrunk * 0x1p-32 + (double)limbs[l];
    // 2^(LOWEST + 32 (LIMBS - 1)).
    return sound ? shrunk * 0x1p288 : __longlong_as_double(0x7ff8000000000000ll);
}

// Without limits, losses do not count.
extern "C" __global__ void gradient_norm(
    const i64 *sum, const float *scalars, const i64 *losses, const float *limits, float *stats) {
    float nan = __uint_as_float(0x7fc00000u);
    float norm = (float)sqrt(sum_value(sum));
    bool admitted = !limits || (sum_value(losses) * (double)scalars[1] <= (double)limits[0] && norm <= limits[1]);
    // In f64, since a ratio of two f32 need not be one.
    double clip = norm > scalars[2] ? (double)scalars[2] / (double)norm : 1.0;
    stats[0] = norm;
    stats[1] = isfinite(norm) && admitted ? (float)((double)(scalars[1] / scalars[5]) * clip) : nan;
}

struct Moved {
    const void *grad;
    float *w, *m, *v;
    void *copy;
    i64 n;
    float decay, lr_scale;
};

// Where the factor is NaN nothing moves. The rounded copy is written all the same: a step may have used its memory.

// Four elements per thread. `C` is what parameters are rounded to, where they are.
template <typename G, typename C>
static __device__ void adamw(const Many<Moved> &tensors, const float *scalars, const float *stats, float beta1,
                             float beta2, float eps) {
    int tensor = tensors.find(blockIdx.x);
    const Moved &t = tensors.entries[tensor];
    const G *grad = (const G *)t.grad;
    float *w = t.w, *m = t.m, *v = t.v;
    C *copy = (C *)t.copy;
    i64 n = t.n;
    float decay = t.decay, lr_scale = t.lr_scale;
    i64 i = ((i64)(blockIdx.x - tensors.first_block[tensor]) * blockDim.x + threadIdx.x) * 4;
    if (i >= n) return;
    float factor = stats[1];
    if (factor != factor) {
        if (copy)
            for (i64 end = i + 4 < n ? i + 4 : n; i < end; i++) copy[i] = Of<C>::f32(w[i]);
        return;
    }
    float lr = scalars[0] * lr_scale;
    float keep = 1.0f - lr * decay, rate = lr / scalars[3], root = 1.0f / sqrtf(scalars[4]);
    auto update = [&](float g, float &w, float &m, float &v) {
        g *= factor;
        m = beta1 * m + (1.0f - beta1) * g;
        v = beta2 * v + (1.0f - beta2) * g * g;
        w = w * keep - rate * m / (sqrtf(v) * root + eps);
    };
    if (i + 4 <= n) {
        float4 W = *(float4 *)(w + i), M = *(float4 *)(m + i), V = *(float4 *)(v + i);
        float g[4];
        load4(grad + i, g);
        update(g[0], W.x, M.x, V.x);
        update(g[1], W.y, M.y, V.y);
        update(g[2], W.z, M.z, V.z);
        update(g[3], W.w, M.w, V.w);
        *(float4 *)(w + i) = W;
        *(float4 *)(m + i) = M;
        *(float4 *)(v + i) = V;
        if (copy)
            *(ushort4 *)(copy + i) = make_ushort4(Of<C>::f32(W.x).bits, Of<C>::f32(W.y).bits, Of<C>::f32(W.z).bits,
                                                  Of<C>::f32(W.w).bits);
    } else {
        for (; i < n; i++) {
            update(to_f32(grad[i]), w[i], m[i], v[i]);
            if (copy) copy[i] = Of<C>::f32(w[i]);
        }
    }
}

#define ADAMW(G, C, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        adamw_##NAME(const __grid_constant__ Many<Moved> tensors, const float *scalars, const float *stats,            \
                     float beta1, float beta2, float eps) {                                                            \
        adamw<G, C>(tensors, scalars, stats, beta1, beta2, eps);                                                       \
    }
ADAMW(float, bf16, f32_bf16)
ADAMW(bf16, bf16, bf16_bf16)
ADAMW(i64, bf16, fixed_bf16)
ADAMW(float, f16, f32_f16)
ADAMW(bf16, f16, bf16_f16)
ADAMW(i64, f16, fixed_f16)

// Lion: the sign of a mixture of moment and gradient.
template <typename G, typename C>
static __device__ void lion(const G *grad, const float *scalars, const float *stats, float *w, float *m, C *copy,
                            i64 n, float beta1, float beta2, float decay, float lr_scale) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    float factor = stats[1];
    if (i >= n) return;
    if (factor != factor) {
        if (copy) copy[i] = Of<C>::f32(w[i]);
        return;
    }
    float lr = scalars[0] * lr_scale, g = to_f32(grad[i]) * factor;
    float mixed = beta1 * m[i] + (1.0f - beta1) * g;
    float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
    m[i] = beta2 * m[i] + (1.0f - beta2) * g;
    w[i] = w[i] * (1.0f - lr * decay) - lr * sign;
    if (copy) copy[i] = Of<C>::f32(w[i]);
}

template <typename G, typename C>
static __device__ void sgd(const G *grad, const float *scalars, const float *stats, float *w, float *m, C *copy,
                           i64 n, float momentum, float, float decay, float lr_scale) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    float factor = stats[1];
    if (i >= n) return;
    if (factor != factor) {
        if (copy) copy[i] = Of<C>::f32(w[i]);
        return;
    }
    float lr = scalars[0] * lr_scale;
    m[i] = momentum * m[i] + to_f32(grad[i]) * factor;
    w[i] = w[i] * (1.0f - lr * decay) - lr * m[i];
    if (copy) copy[i] = Of<C>::f32(w[i]);
}

// The momentum of gradients, and a look one step ahead.
template <typename G>
static __device__ void momentum(const G *grad, const float *stats, float *m, float *update, i64 n, float beta) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float factor = stats[1];
    if (factor != factor) {
        if (update) update[i] = 0.0f;
        return;
    }
    float g = to_f32(grad[i]) * factor;
    float next = beta * m[i] + (1.0f - beta) * g;
    m[i] = next;
    if (update) update[i] = beta * next + (1.0f - beta) * g;
}

template <typename C>
static __device__ void descend(const float *update, const float *scalars, const float *stats, float *w, C *copy, i64 n,
                               float decay, float lr_scale) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    float factor = stats[1], lr = scalars[0] * lr_scale;
    if (i >= n) return;
    if (factor == factor) w[i] = w[i] - lr * (decay * w[i] + update[i]);
    if (copy) copy[i] = Of<C>::f32(w[i]);
}

#define RULES(G, C, NAME)                                                                                              \
    extern "C" __global__ void lion_##NAME(const G *grad, const float *scalars, const float *stats, float *w,          \
                                           float *m, C *copy, i64 n, float a, float b, float decay, float lr) {        \
        lion<G, C>(grad, scalars, stats, w, m, copy, n, a, b, decay, lr);                                              \
    }                                                                                                                  \
    extern "C" __global__ void sgd_##NAME(const G *grad, const float *scalars, const float *stats, float *w, float *m, \
                                          C *copy, i64 n, float a, float b, float decay, float lr) {                   \
        sgd<G, C>(grad, scalars, stats, w, m, copy, n, a, b, decay, lr);                                               \
    }
RULES(float, bf16, f32_bf16)
RULES(bf16, bf16, bf16_bf16)
RULES(i64, bf16, fixed_bf16)
RULES(float, f16, f32_f16)
RULES(bf16, f16, bf16_f16)
RULES(i64, f16, fixed_f16)

#define DESCEND(C, NAME)                                                                                               \
    extern "C" __global__ void descend_##NAME(const float *update, const float *scalars, const float *stats, float *w, \
                                              C *copy, i64 n, float decay, float lr_scale) {                           \
        descend<C>(update, scalars, stats, w, copy, n, decay, lr_scale);                                               \
    }
DESCEND(bf16, bf16)
DESCEND(f16, f16)

#define MOMENTUM(G, NAME)                                                                                              \
    extern "C" __global__ void momentum_##NAME(const G *grad, const float *stats, float *m, float *update, i64 n,      \
                                               float beta) {                                                           \
        momentum<G>(grad, stats, m, update, n, beta);                                                                  \
    }
MOMENTUM(float, f32)
MOMENTUM(bf16, bf16)
MOMENTUM(i64, fixed)

// Shares of the sum of squares of a matrix, 256 of them.
extern "C" __global__ void matrix_squares(const float *x, double *shares, i64 n) {
    __shared__ double part[256];
    double sum = 0.0;
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * 256) sum += (double)x[i] * x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 128; step; step >>= 1) {
        if ((int)threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) shares[blockIdx.x] = part[0];
}

// out = x ÷ (√Σ shares + eps).
extern "C" __global__ void divide_by_norm(const float *x, const double *shares, float *out, i64 n, float eps) {
    __shared__ double part[256];
    part[threadIdx.x] = shares[threadIdx.x];
    __syncthreads();
    for (int step = 128; step; step >>= 1) {
        if ((int)threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    float norm = (float)sqrt(part[0]) + eps;
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) out[i] = x[i] / norm;
}

// out = a · x + b · y.
extern "C" __global__ void combine(const float *x, const float *y, float *out, i64 n, float a, float b) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + b * y[i];
}
