// What all kernels share: bf16 and f16 as bits, 16-byte packs, sums over a block in a fixed order. No toolkit header is needed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

// Which entries of a dimension a rank has: `count` from `first` on, then from `then` on.
struct Span {
    int first, count, then;
    __device__ __forceinline__ int entry(int at) const { return at < count ? first + at : then + (at - count); }
    // Where an entry stands among the rank's `len`; -1 where another rank has it.
    __device__ __forceinline__ int at(int entry, int len) const {
        int early = entry - first, late = entry - then;
        if (early >= 0 && early < count && early < len) return early;
        return late >= 0 && late < len - count ? count + late : -1;
    }
};

static __device__ __forceinline__ float to_f32(float x) { return x; }
static __device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
static __device__ __forceinline__ float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T>
struct Of;
template <>
struct Of<float> {
    static __device__ __forceinline__ float f32(float x) { return x; }
};
template <>
struct Of<bf16> {
    static __device__ __forceinline__ bf16 f32(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    // Two as a word. The first operand of the instruction becomes the upper half.
    static __device__ __forceinline__ u32 two(float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
};
// What is too large becomes infinite.
template <>
struct Of<f16> {
    static __device__ __forceinline__ f16 f32(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    static __device__ __forceinline__ u32 two(float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
};

// As many elements as 16 bytes hold, as words: two of 16 bits are rounded together by one instruction.
template <typename T>
struct alignas(16) Pack {
    static const int N = 16 / sizeof(T);
    u32 words[4];
};

static __device__ __forceinline__ void unpack(const Pack<float> &p, float *x) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(p.words[i]);
}

static __device__ __forceinline__ void unpack(const Pack<bf16> &p, float *x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(p.words[i] << 16);
        x[2 * i + 1] = __uint_as_float(p.words[i] & 0xffff0000u);
    }
}

static __device__ __forceinline__ void unpack(const Pack<f16> &p, float *x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = to_f32(f16{(u16)p.words[i]});
        x[2 * i + 1] = to_f32(f16{(u16)(p.words[i] >> 16)});
    }
}

static __device__ __forceinline__ void pack(const float *x, Pack<float> &p) {
#pragma unroll
    for (int i = 0; i < 4; i++) p.words[i] = __float_as_uint(x[i]);
}

template <typename T>
static __device__ __forceinline__ void pack(const float *x, Pack<T> &p) {
#pragma unroll
    for (int i = 0; i < 4; i++) p.words[i] = Of<T>::two(x[2 * i], x[2 * i + 1]);
}

template <typename T>
static __device__ __forceinline__ void load(const T *from, float *x) {
    unpack(*reinterpret_cast<const Pack<T> *>(from), x);
}

template <typename T>
static __device__ __forceinline__ void store(T *to, const float *x) {
    Pack<T> p;
    pack(x, p);
    *reinterpret_cast<Pack<T> *>(to) = p;
}

// Programmatic dependent launch. A kernel that is launched early begins while those before it still run; until it has waited for them it reads only what none of
// them writes, such as weights, and writes nothing. A kernel that was not launched early does not wait.
static __device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
static __device__ __forceinline__ void wait_for_those_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        float y = __shfl_xor_sync(~0u, x, step);
        x = y > x || y != y ? y : x;
    }
    return x;
}

// The sum of a number of every thread, on every thread. The number of threads is a multiple of 32.
static __device__ __forceinline__ float block_sum(float x, float *shared) {
    int warps = blockDim.x >> 5, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_sum(x);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

// Magnitudes as bits have the order of numbers, and NaN is the largest of all.
static __device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

static __device__ __forceinline__ u32 block_max(u32 x, u32 *shared) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(~0u, x, step));
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = lane < warps ? shared[lane] : 0;
#pragma unroll
    for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// SplitMix64, as on the host.
static __device__ __forceinline__ u64 hash_bits(u64 key, u64 counter) {
    u64 z = key + counter * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static __device__ __forceinline__ u32 mix_small(u32 z) {
    z = (z ^ (z >> 16)) * 0x7feb352du;
    z = (z ^ (z >> 15)) * 0x846ca68bu;
    return z ^ (z >> 16);
}

// 32 random bits at `i` of a stream.
static __device__ __forceinline__ u32 row_bits(u64 row, u32 i) {
    u32 z = mix_small((u32)row + i * 0x9e3779b9u);
    return mix_small(z ^ (u32)(row >> 32));
}

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
