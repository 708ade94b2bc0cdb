// fp8: the formats, units, and what a block of threads has of a tensor.

// The formats: the exponent of the largest number, and two numbers as bytes. What is too large becomes the largest finite one.
struct E4M3 {
    static const int TOP = 8;
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
