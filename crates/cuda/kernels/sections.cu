// Copies of columns of rows.

#define SECTIONS(T, NAME)                                                                                              \
    extern "C" __global__ void copy_columns_##NAME(const T *from, T *to, int from_width, int to_width, int n) {        \
        i64 row = blockIdx.x;                                                                                          \
        int step = gridDim.y * blockDim.x;                                                                             \
        for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < n; i += step)                                          \
            to[row * to_width + i] = from[row * from_width + i];                                                       \
    }
SECTIONS(float, f32)
SECTIONS(bf16, bf16)
