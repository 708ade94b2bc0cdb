// y = an expression of x, element by element, from one type to another. The list of them follows this text (`ops::maps`).

// Elements that a thread has.
const int EACH = 4;
template <typename T>
struct alignas(EACH * sizeof(T)) Four {
    T x[EACH];
};

template <typename T, typename U, typename F>
static __device__ __forceinline__ void map(const T *x, U *y, i64 n, F f) {
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * EACH;
    if (i + EACH <= n) {
        Four<T> in = *(const Four<T> *)(x + i);
        Four<U> out;
#pragma unroll
        for (int j = 0; j < EACH; j++) out.x[j] = Of<U>::f32(f(to_f32(in.x[j])));
        *(Four<U> *)(y + i) = out;
    } else {
        for (; i < n; i++) y[i] = Of<U>::f32(f(to_f32(x[i])));
    }
}

#define MAP_TYPES(NAME, T, FROM, U, TO, EXPRESSION)                                                                    \
    extern "C" __global__ void NAME##_##FROM##_##TO(const T *from, U *to, i64 n) {                                     \
        map(from, to, n, [](float x) -> float { return EXPRESSION; });                                                 \
    }
#define MAP(NAME, EXPRESSION)                                                                                          \
    MAP_TYPES(NAME, float, f32, float, f32, EXPRESSION)                                                                \
    MAP_TYPES(NAME, float, f32, bf16, bf16, EXPRESSION)                                                                \
    MAP_TYPES(NAME, float, f32, f16, f16, EXPRESSION)                                                                  \
    MAP_TYPES(NAME, bf16, bf16, float, f32, EXPRESSION)                                                                \
    MAP_TYPES(NAME, bf16, bf16, bf16, bf16, EXPRESSION)                                                                \
    MAP_TYPES(NAME, bf16, bf16, f16, f16, EXPRESSION)                                                                  \
    MAP_TYPES(NAME, f16, f16, float, f32, EXPRESSION)                                                                  \
    MAP_TYPES(NAME, f16, f16, bf16, bf16, EXPRESSION)                                                                  \
    MAP_TYPES(NAME, f16, f16, f16, f16, EXPRESSION)

