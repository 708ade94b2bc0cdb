// Copies of columns of rows.

#define SECTIONS(T, NAME)                                                                                              \
    extern "C" __global__ void copy_columns_##NAME(const T *from, T *to, int from_width, int to_width, int n) {        \
        i64 row = blockIdx.x;                                                                                          \
        for (int i = threadIdx.x; i < n; i += blockDim.x) to[row * to_width + i] = from[row * from_width + i];         \
    }
SECTIONS(float, f32)
SECTIONS(bf16, bf16)
