// Heads of latent attention: packed Q·K·V from queries, from what the latent expands to, and from the key that all heads share.
// A head of Q is `plain` elements and then pairs with RoPE; one of kv is `plain` elements of a key and then a value. In packed Q·K·V
// what has RoPE stands first, evens before odds. Grid: rows.

struct Sizes {
    int heads, head, rope, value;

    __device__ __forceinline__ int plain() const { return head - rope; }
    __device__ __forceinline__ int q() const { return heads * head; }
    __device__ __forceinline__ int kv() const { return heads * (plain() + value); }
    __device__ __forceinline__ int qkv() const { return 2 * q() + heads * value; }
    // Which element of the pairs stands at place i of the halves, and where an element of the pairs stands.
    __device__ __forceinline__ int pair(int i) const { return i < rope / 2 ? 2 * i : 2 * (i - rope / 2) + 1; }
    __device__ __forceinline__ int place(int i) const { return i / 2 + i % 2 * (rope / 2); }
};

// A pack of 16 bytes, times a scale where there is one. A scale of one leaves the bits as they are.
template <typename T>
static __device__ __forceinline__ Pack<T> scaled(Pack<T> p, float scale) {
    if (scale == 1.0f) return p;
    float x[Pack<T>::N];
    unpack(p, x);
#pragma unroll
    for (int i = 0; i < Pack<T>::N; i++) x[i] *= scale;
    pack(x, p);
    return p;
}

// Two packs of pairs become one of evens and one of odds, and back.
template <typename T>
static __device__ __forceinline__ void part_pairs(const T *from, T *evens, T *odds, float scale) {
    const int N = Pack<T>::N;
    float x[2 * N], even[N], odd[N];
    load(from, x), load(from + N, x + N);
#pragma unroll
    for (int i = 0; i < N; i++) even[i] = x[2 * i] * scale, odd[i] = x[2 * i + 1] * scale;
    store(evens, even), store(odds, odd);
}
template <typename T>
static __device__ __forceinline__ void join_pairs(const T *evens, const T *odds, T *to, float scale) {
    const int N = Pack<T>::N;
    float x[2 * N], even[N], odd[N];
    load(evens, even), load(odds, odd);
#pragma unroll
    for (int i = 0; i < N; i++) x[2 * i] = even[i] * scale, x[2 * i + 1] = odd[i] * scale;
    store(to, x), store(to + N, x + N);
}

// The same as `heads` and `grad` below, a pack at a time: where heads, what has RoPE of them, and values are whole packs, and RoPE whole pairs of packs.
// A unit of work is what a pack of a plain section, or two of pairs, becomes.
template <typename T>
static __device__ void heads_wide(const T *q, const T *kv, const T *shared, T *qkv, Sizes n, float scale) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    q += row * n.q(), kv += row * n.kv(), shared += row * n.rope, qkv += row * n.qkv();
    int expanded = n.plain() + n.value, half = n.rope / 2, pairs = half / N, plain = n.plain() / N, value = n.value / N;
    T *keys = qkv + n.q(), *values = keys + n.q();
    int per_head = 2 * (pairs + plain) + value;
    for (int at = threadIdx.x; at < n.heads * per_head; at += blockDim.x) {
        int h = at / per_head, i = at - h * per_head, to = h * n.head;
        if (i < pairs) {
            part_pairs(q + to + n.plain() + 2 * i * N, qkv + to + i * N, qkv + to + half + i * N, scale);
        } else if ((i -= pairs) < plain) {
            *(Pack<T> *)(qkv + to + n.rope + i * N) = scaled(*(const Pack<T> *)(q + to + i * N), scale);
        } else if ((i -= plain) < pairs) {
            part_pairs(shared + 2 * i * N, keys + to + i * N, keys + to + half + i * N, 1.0f);
        } else if ((i -= pairs) < plain) {
            *(Pack<T> *)(keys + to + n.rope + i * N) = *(const Pack<T> *)(kv + h * expanded + i * N);
        } else {
            i -= plain;
            *(Pack<T> *)(values + h * n.value + i * N) = *(const Pack<T> *)(kv + h * expanded + n.plain() + i * N);
        }
    }
}

template <typename T>
static __device__ void grad_wide(const T *dqkv, T *dq, T *dkv, Sizes n, float scale) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    dqkv += row * n.qkv();
    int expanded = n.plain() + n.value, half = n.rope / 2, pairs = half / N, plain = n.plain() / N, value = n.value / N;
    const T *keys = dqkv + n.q(), *values = keys + n.q();
    int of_q = dq ? pairs + plain : 0, per_head = of_q + (dkv ? plain + value : 0);
    for (int at = threadIdx.x; at < n.heads * per_head; at += blockDim.x) {
        int h = at / per_head, i = at - h * per_head, from = h * n.head;
        T *to_q = dq + row * n.q() + from, *to = dkv + row * n.kv() + h * expanded;
        if (i < of_q && i < pairs) {
            join_pairs(dqkv + from + i * N, dqkv + from + half + i * N, to_q + n.plain() + 2 * i * N, scale);
        } else if (i < of_q) {
            i -= pairs;
            *(Pack<T> *)(to_q + i * N) = scaled(*(const Pack<T> *)(dqkv + from + n.rope + i * N), scale);
        } else if ((i -= of_q) < plain) {
            *(Pack<T> *)(to + i * N) = *(const Pack<T> *)(keys + from + n.rope + i * N);
        } else {
            i -= plain;
            *(Pack<T> *)(to + n.plain() + i * N) = *(const Pack<T> *)(values + h * n.value + i * N);
        }
    }
}

template <typename T>
static __device__ __forceinline__ bool wide(Sizes n) {
    const int N = Pack<T>::N;
    return n.rope % (2 * N) == 0 && n.plain() % N == 0 && n.value % N == 0;
}

template <typename T>
static __device__ void heads(const T *q, const T *kv, const T *shared, T *qkv, Sizes n, float scale) {
    if (wide<T>(n)) return heads_wide<T>(q, kv, shared, qkv, n, scale);
    i64 row = blockIdx.x;
    q += row * n.q();
    kv += row * n.kv();
    shared += row * n.rope;
    qkv += row * n.qkv();
    int expanded = n.plain() + n.value;
    for (int at = threadIdx.x; at < n.q(); at += blockDim.x) {
        int h = at / n.head, i = at - h * n.head;
        int from = i < n.rope ? n.plain() + n.pair(i) : i - n.rope;
        qkv[at] = Of<T>::f32(to_f32(q[h * n.head + from]) * scale);
        qkv[n.q() + at] = i < n.rope ? shared[n.pair(i)] : kv[h * expanded + i - n.rope];
    }
    for (int at = threadIdx.x; at < n.heads * n.value; at += blockDim.x) {
        int h = at / n.value, i = at - h * n.value;
        qkv[2 * n.q() + at] = kv[h * expanded + n.plain() + i];
    }
}

// Any of the gradients may be null. That of the shared key is the sum over heads, in their order.
template <typename T>
static __device__ void grad(const T *dqkv, T *dq, T *dkv, T *dshared, Sizes n, float scale) {
    bool packs = wide<T>(n);
    if (packs && (dq || dkv)) grad_wide<T>(dqkv, dq, dkv, n, scale);
    i64 row = blockIdx.x;
    dqkv += row * n.qkv();
    int expanded = n.plain() + n.value;
    if (dq && !packs)
        for (int at = threadIdx.x; at < n.q(); at += blockDim.x) {
            int h = at / n.head, i = at - h * n.head;
            int from = i < n.plain() ? n.rope + i : n.place(i - n.plain());
            dq[row * n.q() + at] = Of<T>::f32(to_f32(dqkv[h * n.head + from]) * scale);
        }
    if (dkv && !packs)
        for (int at = threadIdx.x; at < n.kv(); at += blockDim.x) {
            int h = at / expanded, i = at - h * expanded;
            int from = i < n.plain() ? n.q() + h * n.head + n.rope + i : 2 * n.q() + h * n.value + i - n.plain();
            dkv[row * n.kv() + at] = dqkv[from];
        }
    if (dshared)
        for (int i = threadIdx.x; i < n.rope; i += blockDim.x) {
            const T *from = dqkv + n.q() + n.place(i);
            float sum = 0.0f;
            for (int h = 0; h < n.heads; h++) sum += to_f32(from[h * n.head]);
            dshared[row * n.rope + i] = Of<T>::f32(sum);
        }
}

#define LATENT(T, NAME)                                                                                                \
    extern "C" __global__ void latent_heads_##NAME(const T *q, const T *kv, const T *shared, T *qkv, int count,        \
                                                   int head, int rope, int value, float scale) {                       \
        heads<T>(q, kv, shared, qkv, {count, head, rope, value}, scale);                                               \
    }                                                                                                                  \
    extern "C" __global__ void latent_heads_grad_##NAME(const T *dqkv, T *dq, T *dkv, T *dshared, int count, int head, \
                                                        int rope, int value, float scale) {                            \
        grad<T>(dqkv, dq, dkv, dshared, {count, head, rope, value}, scale);                                            \
    }
LATENT(float, f32)
LATENT(bf16, bf16)
LATENT(f16, f16)
