// fp8 with many units in a tensor. A block of threads has a tile of 128 rows and 128 columns, as in `quantise.cu`, and finds the largest magnitudes of its rows and
// columns. Those are all of a block of 128 elements; of whole rows and columns they are gathered first.

enum By { BLOCKS, BLOCKS_OF_WEIGHT, MEASURE, ROWS };

template <typename T, typename F, int BY>
static __device__ __forceinline__ void quantise_fine(const T *x, u32 *of_rows, u32 *of_columns, u8 *q, float *units,
                                                     u8 *transposed, float *units_transposed, i64 rows, i64 columns) {
    __shared__ u32 tile[TILE * (WORDS + 1)];
    __shared__ u32 found[8][TILE], most[TILE];
    i64 first_row = (i64)blockIdx.x * TILE, first_column = (i64)blockIdx.y * TILE;
    int pack = threadIdx.x & 15, turn = 2 * (pack >> 2), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 column = first_column + pack * 8;
    float v[2][4][8] = {};
    u32 row_most[2][4] = {}, column_most[8] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 row = first_row + ((threadIdx.x >> 4) + half * 16) * 4;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (row + r < rows && column < columns) load8(x + (row + r) * columns + column, v[half][r]);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                u32 m = magnitude(v[half][r][c]);
                row_most[half][r] = max(row_most[half][r], m);
                column_most[c] = max(column_most[c], m);
            }
            // Sixteen threads have a row.
#pragma unroll
            for (int step = 8; step; step >>= 1)
                row_most[half][r] = max(row_most[half][r], __shfl_xor_sync(~0u, row_most[half][r], step));
        }
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
        column_most[c] = max(column_most[c], __shfl_xor_sync(~0u, column_most[c], 16));
        if (lane < 16) found[warp][pack * 8 + c] = column_most[c];
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        u32 m = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) m = max(m, found[w][threadIdx.x]);
        most[threadIdx.x] = m;
    }
    __syncthreads();
    i64 my_column = first_column + threadIdx.x;
    bool has_column = threadIdx.x < TILE && my_column < columns;
    if (BY == MEASURE) {
        if (has_column) atomicMax(of_columns + my_column, most[threadIdx.x]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            i64 row = first_row + ((threadIdx.x >> 4) + i / 4 * 16) * 4 + i % 4;
            if (pack == 0 && row < rows) atomicMax(of_rows + row, row_most[i / 4][i % 4]);
        }
        return;
    }
    u32 of_tile = 0;
    if (BY == BLOCKS_OF_WEIGHT)
        for (int i = 0; i < TILE; i++) of_tile = max(of_tile, most[i]);
    if (BY == ROWS) {
        __syncthreads();
        if (has_column) most[threadIdx.x] = of_columns[my_column];
        __syncthreads();
    }
    if (has_column && units_transposed) {
        float unit = unit_of<F>(BY == BLOCKS_OF_WEIGHT ? of_tile : most[threadIdx.x]);
        if (BY != ROWS) units_transposed[blockIdx.x * columns + my_column] = unit;
        else if (blockIdx.x == 0) units_transposed[my_column] = unit;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int line = (threadIdx.x >> 4) + half * 16;
        i64 row = first_row + line * 4;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (row + r >= rows || column >= columns) continue;
            u32 m = BY == BLOCKS ? row_most[half][r] : BY == ROWS ? of_rows[row + r] : of_tile;
            float unit = unit_of<F>(m), scale = reciprocal(unit);
            if (units && pack == 0) {
                if (BY != ROWS) units[blockIdx.y * rows + row + r] = unit;
                else if (blockIdx.y == 0) units[row + r] = unit;
            }
            if (!q) continue;
            u64 bytes = 0;
#pragma unroll
            for (int c = 0; c < 8; c += 2)
                bytes |= (u64)F::two(v[half][r][c] * scale, v[half][r][c + 1] * scale) << (8 * c);
            *(u64 *)(q + (row + r) * columns + column) = bytes;
        }
        if (transposed) {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                float scale = reciprocal(unit_of<F>(BY == BLOCKS_OF_WEIGHT ? of_tile : most[pack * 8 + c]));
                u32 word = F::two(v[half][0][c] * scale, v[half][1][c] * scale) |
                           F::two(v[half][2][c] * scale, v[half][3][c] * scale) << 16;
                tile[(pack * 8 + c) * (WORDS + 1) + ((line + turn) & (WORDS - 1))] = word;
            }
        }
    }
    if (!transposed) return;
    __syncthreads();
    for (int c = warp; c < TILE; c += 8) {
        i64 to = first_column + c, row = first_row + lane * 4;
        if (to >= columns || row >= rows) continue;
        u32 word = tile[c * (WORDS + 1) + ((lane + 2 * (c >> 5)) & (WORDS - 1))];
        *(u32 *)(transposed + to * rows + row) = word;
    }
}

#define FINE(name, T, F, BY)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        name(const T *x, u32 *of_rows, u32 *of_columns, u8 *q, float *units, u8 *transposed, float *units_transposed,  \
             i64 rows, i64 columns) {                                                                                  \
        quantise_fine<T, F, BY>(x, of_rows, of_columns, q, units, transposed, units_transposed, rows, columns);        \
    }
#define LOST(name, T, F)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        name(const T *x, const float *units, i64 width, double *seen, i64 rows, i64 columns) {                         \
        auto unit = [=](i64 row, i64 column) { return units[column / width * rows + row]; };                           \
        look<T, F>(x, seen, rows, columns, unit);                                                                      \
    }
#define FINE_OF(T, NAME)                                                                                               \
    FINE(blocks_##NAME##_e4m3, T, E4M3, BLOCKS)                                                                        \
    FINE(blocks_##NAME##_e5m2, T, E5M2, BLOCKS)                                                                        \
    FINE(blocks_of_weight_##NAME##_e4m3, T, E4M3, BLOCKS_OF_WEIGHT)                                                    \
    FINE(measure_##NAME, T, E4M3, MEASURE)                                                                             \
    FINE(rows_##NAME##_e4m3, T, E4M3, ROWS)                                                                            \
    FINE(rows_##NAME##_e5m2, T, E5M2, ROWS)                                                                            \
    LOST(lost_##NAME##_e4m3, T, E4M3)                                                                                  \
    LOST(lost_##NAME##_e5m2, T, E5M2)
FINE_OF(float, f32)
FINE_OF(bf16, bf16)
FINE_OF(f16, f16)
