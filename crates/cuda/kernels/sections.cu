// Copies: in another type, and of columns of rows.

struct f16 {
    u16 bits;
};

template <>
struct Of<f16> {
    static __device__ __forceinline__ f16 f32(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

#define CAST(T, FROM, U, TO)                                                                                           \
    extern "C" __global__ void cast_##FROM##_##TO(const T *x, U *y, i64 n) {                                           \
        i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;                                                            \
        if (i < n) y[i] = Of<U>::f32(to_f32(x[i]));                                                                    \
    }

#define SECTIONS(T, NAME)                                                                                              \
    CAST(T, NAME, float, f32)                                                                                          \
    CAST(T, NAME, bf16, bf16)                                                                                          \
    CAST(T, NAME, f16, f16)                                                                                            \
    extern "C" __global__ void copy_columns_##NAME(const T *from, T *to, int from_width, int to_width, int n) {        \
        i64 row = blockIdx.x;                                                                                          \
        for (int i = threadIdx.x; i < n; i += blockDim.x) to[row * to_width + i] = from[row * from_width + i];         \
    }
SECTIONS(float, f32)
SECTIONS(bf16, bf16)
