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

template <typename T>
static __device__ void heads(const T *q, const T *kv, const T *shared, T *qkv, Sizes n, float scale) {
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
    i64 row = blockIdx.x;
    dqkv += row * n.qkv();
    int expanded = n.plain() + n.value;
    if (dq)
        for (int at = threadIdx.x; at < n.q(); at += blockDim.x) {
            int h = at / n.head, i = at - h * n.head;
            int from = i < n.plain() ? n.rope + i : n.place(i - n.plain());
            dq[row * n.q() + at] = Of<T>::f32(to_f32(dqkv[h * n.head + from]) * scale);
        }
    if (dkv)
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
