// fp8: the formats, units, and what a block of threads has of a tensor.

// The formats: the exponent of the largest number, that number, half of the smallest one, and two numbers as bytes. What is too large becomes the largest
// finite one.
struct E4M3 {
    static const int TOP = 8;
    static __device__ __forceinline__ float largest() { return 448.0f; }
    static __device__ __forceinline__ float half_smallest() { return 0x1p-10f; }
    static __device__ __forceinline__ u32 two(float low, float high) {
        u16 bytes = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
#endif
        return bytes;
    }
};

struct E5M2 {
    static const int TOP = 15;
    static __device__ __forceinline__ float largest() { return 57344.0f; }
    static __device__ __forceinline__ float half_smallest() { return 0x1p-17f; }
    static __device__ __forceinline__ u32 two(float low, float high) {
        u16 bytes = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
#endif
        return bytes;
    }
};

// The unit of a tensor, a power of two, as on the host.
template <typename F>
static __device__ __forceinline__ float unit_of(u32 most) {
    if (most >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    if (most == 0) return 1.0f;
    int exponent = max((int)(most >> 23), 1) + ((most & 0x7fffffu) > 0x600000u) - F::TOP;
    return __uint_as_float((u32)max(exponent, 1) << 23);
}

// Of a power of two, exactly; of NaN NaN.
static __device__ __forceinline__ float reciprocal(float unit) {
    u32 bits = __float_as_uint(unit);
    return bits > 0x7f800000u ? unit : __uint_as_float((254u << 23) - bits);
}

static __device__ __forceinline__ void load8(const float *from, float *x) {
    load(from, x);
    load(from + 4, x + 4);
}
static __device__ __forceinline__ void load8(const bf16 *from, float *x) { load(from, x); }
static __device__ __forceinline__ void load8(const f16 *from, float *x) { load(from, x); }

// A block has a tile of 128 rows and 128 columns; a thread has 8 columns of 4 rows at a time, so that 4 rows of a column are a word of the transpose.
const int TILE = 128;
const int WORDS = TILE / 4;

// What rounding loses, as on the host: elements of every 61st tile, those of them that are too large, those that become 0, and tiles by the class of their
// largest magnitude.
const int SEEN = 128, CLASSES = 3, LOWEST = 31, EVERY = 61;

// Of elements that a thread has: all, those too large and those that become 0.
struct Lost {
    u32 all = 0, large = 0, small = 0;
    template <typename F>
    __device__ __forceinline__ void count(float x, float scaled) {
        float size = fabsf(scaled);
        large += !(size <= F::largest());
        small += x != 0.0f && size <= F::half_smallest();
        all += 1;
    }
};

// Adds up what the threads of a block have.
static __device__ __forceinline__ void store_lost(Lost lost, double *seen) {
    __shared__ u32 counts[CLASSES];
    if (threadIdx.x < CLASSES) counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        lost.all += __shfl_xor_sync(~0u, lost.all, step);
        lost.large += __shfl_xor_sync(~0u, lost.large, step);
        lost.small += __shfl_xor_sync(~0u, lost.small, step);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(counts, lost.all);
        atomicAdd(counts + 1, lost.large);
        atomicAdd(counts + 2, lost.small);
    }
    __syncthreads();
    if (threadIdx.x < CLASSES && counts[threadIdx.x]) atomicAdd(seen + threadIdx.x, (double)counts[threadIdx.x]);
}

// Of the tile that a block looks at: a thread has 8 columns of every 16th row. `unit` is given a row and a column.
template <typename T, typename F, typename U>
static __device__ __forceinline__ void look(const T *x, double *seen, i64 rows, i64 columns, U unit) {
    i64 across = (columns + TILE - 1) / TILE, tile = (i64)blockIdx.x * EVERY;
    i64 column = tile % across * TILE + (threadIdx.x & 15) * 8;
    Lost lost;
    for (int i = threadIdx.x >> 4; i < TILE; i += blockDim.x >> 4) {
        i64 row = tile / across * TILE + i;
        if (row >= rows || column >= columns) continue;
        float v[8], scale = reciprocal(unit(row, column));
        load8(x + row * columns + column, v);
#pragma unroll
        for (int c = 0; c < 8; c++) lost.count<F>(v[c], v[c] * scale);
    }
    store_lost(lost, seen);
}

// Counts a tile with this largest magnitude of a thread's elements.
static __device__ __forceinline__ void store_class(u32 most, double *seen) {
    __shared__ u32 shared[32];
    most = block_max(most, shared);
    if (threadIdx.x || !most) return;
    int exponent = (int)(most >> 23) + ((most & 0x7fffffu) > 0x600000u);
    atomicAdd(seen + CLASSES + min(max(exponent - LOWEST, 0), SEEN - 1 - CLASSES), 1.0);
}
