// Copies of columns of rows, and of heads in parts.

#define SECTIONS(T, NAME)                                                                                              \
    extern "C" __global__ void copy_columns_##NAME(const T *from, T *to, int from_width, int to_width, int n) {        \
        i64 row = blockIdx.x;                                                                                          \
        int step = gridDim.y * blockDim.x;                                                                             \
        for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < n; i += step)                                          \
            to[row * to_width + i] = from[row * from_width + i];                                                       \
    }
SECTIONS(float, f32)
SECTIONS(bf16, bf16)
SECTIONS(f16, f16)

// Heads in parts, blocks [parts, rows, batch, w], and back where `join`. A part has n0, n1 and n2 elements of the sections of packed rows. Positions of
// blocks come in the parts of `ranks`, an early and a late chunk of each. Grid: (rows, parts, batch).
#define HEADS(T, NAME)                                                                                                 \
    extern "C" __global__ void heads_##NAME(const T *from, T *to, int rows, int batch, int parts, int ranks, int n0,   \
                                            int n1, int n2, int join) {                                                \
        int c = blockIdx.x, a = blockIdx.y, b = blockIdx.z, w = n0 + n1 + n2;                                          \
        int chunk = rows / (2 * ranks), rank = c / (2 * chunk), at = c - rank * 2 * chunk;                             \
        int s = at < chunk ? rank * chunk + at : (2 * ranks - 1 - rank) * chunk + at - chunk;                          \
        i64 x = ((i64)b * rows + s) * parts * w, y = (((i64)a * rows + c) * batch + b) * w;                            \
        for (int i = threadIdx.x; i < w; i += blockDim.x) {                                                            \
            int before = i < n0 ? 0 : i < n0 + n1 ? n0 : n0 + n1, n = i < n0 ? n0 : i < n0 + n1 ? n1 : n2;             \
            i64 whole = x + (i64)before * parts + a * n + i - before;                                                  \
            if (join) to[whole] = from[y + i];                                                                         \
            else to[y + i] = from[whole];                                                                              \
        }                                                                                                              \
    }
HEADS(Pack<float>, 16)
HEADS(u32, 4)
HEADS(u16, 2)
