// fp8: the largest magnitude of a tensor, and its bytes with their transpose. Of matrices that have a unit each, blocks stand one after the other.

template <typename T>
static __device__ __forceinline__ void amax(const T *x, float *shares, i64 n) {
    __shared__ u32 shared[32];
    const int N = Pack<T>::N;
    i64 packs = n / N, step = (i64)gridDim.x * blockDim.x;
    x += blockIdx.y * n;
    shares += (i64)blockIdx.y * gridDim.x;
    u32 most = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {
        float v[N];
        load(x + i * N, v);
#pragma unroll
        for (int j = 0; j < N; j++) most = max(most, magnitude(v[j]));
    }
    i64 rest = packs * N + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) most = max(most, magnitude(to_f32(x[rest])));
    most = block_max(most, shared);
    if (threadIdx.x == 0) shares[blockIdx.x] = __uint_as_float(most);
}

extern "C" __global__ void amax_f32(const float *x, float *shares, i64 n) { amax(x, shares, n); }
extern "C" __global__ void amax_bf16(const bf16 *x, float *shares, i64 n) { amax(x, shares, n); }
extern "C" __global__ void amax_f16(const f16 *x, float *shares, i64 n) { amax(x, shares, n); }

extern "C" __global__ void amax_of_shares(const float *shares, int count, float *out, int parts) {
    __shared__ u32 shared[32];
    u32 most = 0;
    shares += (i64)blockIdx.x * count;
    out += (i64)blockIdx.x * parts;
    for (int i = threadIdx.x; i < count; i += blockDim.x) most = max(most, magnitude(shares[i]));
    most = block_max(most, shared);
    for (int i = threadIdx.x; i < parts; i += blockDim.x) out[i] = __uint_as_float(most);
}

static __device__ __forceinline__ u32 largest_of(const float *amax, int parts) {
    u32 most = 0;
    for (int i = 0; i < parts; i++) most = max(most, magnitude(amax[i]));
    return most;
}

// What is to be counted after it starts at 0. With MEASURES, tiles are counted by their largest magnitudes here, on top of what is there.
template <typename T, typename F, bool MEASURES>
static __device__ __forceinline__ void quantise(const T *x, const float *amax, int parts, u8 *q, u8 *transposed,
                                                float *unit, double *seen, i64 rows, i64 columns) {
    // A word more in each line, and lines turned by pairs: what the threads of a warp store lies in different banks.
    __shared__ u32 tile[TILE * (WORDS + 1)];
    i64 before = blockIdx.z * rows * columns;
    x += before;
    q += q ? before : 0;
    transposed += transposed ? before : 0;
    amax += (i64)blockIdx.z * parts;
    float one = unit_of<F>(largest_of(amax, parts)), scale = reciprocal(one);
    if (unit && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) unit[blockIdx.z] = one;
    if (!MEASURES && seen && !(blockIdx.x | blockIdx.y | blockIdx.z) && threadIdx.x < SEEN) seen[threadIdx.x] = 0.0;
    i64 first_row = (i64)blockIdx.x * TILE, first_column = (i64)blockIdx.y * TILE;
    int pack = threadIdx.x & 15, turn = 2 * (pack >> 2);
    i64 column = first_column + pack * 8;
    u32 largest = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int line = (threadIdx.x >> 4) + half * 16;
        i64 row = first_row + line * 4;
        if (row >= rows || column >= columns) continue;
        float v[4][8] = {};
        int there = (int)min(rows - row, (i64)4);
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < there) load8(x + (row + r) * columns + column, v[r]);
        if (MEASURES) {
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 8; c++) largest = max(largest, magnitude(v[r][c]));
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int c = 0; c < 8; c++) v[r][c] *= scale;
        }
        if (q) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u64 bytes = 0;
#pragma unroll
                for (int c = 0; c < 8; c += 2) bytes |= (u64)F::two(v[r][c], v[r][c + 1]) << (8 * c);
                if (r < there) *(u64 *)(q + (row + r) * columns + column) = bytes;
            }
        }
        if (transposed) {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                u32 word = F::two(v[0][c], v[1][c]) | F::two(v[2][c], v[3][c]) << 16;
                tile[(pack * 8 + c) * (WORDS + 1) + ((line + turn) & (WORDS - 1))] = word;
            }
        }
    }
    if (MEASURES) store_class(largest, seen);
    if (!transposed) return;
    __syncthreads();
    int lane = threadIdx.x & 31;
    for (int c = threadIdx.x >> 5; c < TILE; c += blockDim.x >> 5) {
        i64 to = first_column + c, row = first_row + lane * 4;
        if (to >= columns || row >= rows) continue;
        u32 word = tile[c * (WORDS + 1) + ((lane + 2 * (c >> 5)) & (WORDS - 1))];
        *(u32 *)(transposed + to * rows + row) = word;
    }
}

#define QUANTISE(name, T, F, MEASURES)                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        name(const T *x, const float *amax, int parts, u8 *q, u8 *transposed, float *unit, double *seen, i64 rows,   \
             i64 columns) {                                                                                          \
        quantise<T, F, MEASURES>(x, amax, parts, q, transposed, unit, seen, rows, columns);                          \
    }
#define LOST(name, T, F)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        name(const T *x, const float *amax, int parts, double *seen, i64 rows, i64 columns) {                        \
        float one = unit_of<F>(largest_of(amax + (i64)blockIdx.y * parts, parts));                                   \
        look<T, F>(x + blockIdx.y * rows * columns, seen, rows, columns, [one](i64, i64) { return one; });           \
    }
#define ALL(NAME, T, F)                                                                                              \
    QUANTISE(quantise_##NAME, T, F, false)                                                                           \
    QUANTISE(measure_##NAME, T, F, true)                                                                             \
    LOST(lost_##NAME, T, F)
ALL(f32_e4m3, float, E4M3)
ALL(f32_e5m2, float, E5M2)
ALL(bf16_e4m3, bf16, E4M3)
ALL(bf16_e5m2, bf16, E5M2)
ALL(f16_e4m3, f16, E4M3)
ALL(f16_e5m2, f16, E5M2)

// next [steps]: the largest magnitude of what was seen, then those of the steps before. One thread has one step.
extern "C" __global__ void __launch_bounds__(1024)
    remember(const float *history, const double *seen, const float *stats, float *next, int steps) {
    __shared__ int found;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    for (int i = CLASSES + threadIdx.x; i < SEEN; i += blockDim.x)
        if (seen[i] > 0.0) atomicMax(&found, i);
    int i = threadIdx.x;
    float before = i < steps ? history[max(i - 1, 0)] : 0.0f, own = i < steps ? history[i] : 0.0f;
    __syncthreads();
    if (i >= steps) return;
    bool moves = found >= 0 && found + 1 < SEEN && !isnan(stats[1]);
    float newest = __uint_as_float((u32)(found - CLASSES + LOWEST) << 23);
    next[i] = !moves ? own : i == 0 ? newest : fmaxf(before, 0.0f);
}
