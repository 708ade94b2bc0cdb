// Weights in bytes, each row in a unit of its own: matmuls of few rows read them as they are (`skinny.cuh`), others have them widened first. A unit is a power of
// two, so a byte in its unit is a bf16 exactly, and both multiply the same numbers.

// Types of bytes.
struct int8 {
    signed char byte;
};
struct e4m3 {
    unsigned char byte;
};

// a · b + c of two pairs.
static __device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two of four bytes as bf16. The seven low bits of one after 0x43 are 128 and they, and its sign after 0x43 is 128 or, where it is negative, 256.
static __device__ __forceinline__ u32 widen_pair(u32 four, bool upper, int8) {
    u32 both = __byte_perm(four, 0x43434343, upper ? 0x4342 : 0x4140);
    return fma_pair(both & 0xff80ff80, 0xbf80bf80, both & 0xff7fff7f);
}

// Exponent and mantissa of a byte where those of a bf16 end are a number 2¹²⁰ times too small. They are moved there by a factor of 16, and the sign further, by
// another of 240: multiplications have units of their own, and those for bits have enough to do.
static __device__ __forceinline__ u32 widen_pair(u32 four, bool upper, e4m3) {
    u32 both = __byte_perm(four, 0, upper ? 0x4342 : 0x4140);
    return fma_pair((both & 0x00800080) * 240 + both * 16, 0x7b807b80, 0);
}

template <typename W>
static __device__ __forceinline__ void widen_step(const uint4 &low, const uint4 &high, u32 (&a)[4][4]) {
    const u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i][0] = widen_pair(l[i], false, W()), a[i][1] = widen_pair(h[i], false, W());
        a[i][2] = widen_pair(l[i], true, W()), a[i][3] = widen_pair(h[i], true, W());
    }
}

template <typename W>
struct ByteStep {
    static const int PARTS = 2, LANE = 16, NEXT = 8, SECOND = PART;
    uint4 low[2], high[2];

    __device__ __forceinline__ void pairs(int part, u32 (&a)[4][4]) const { widen_step<W>(low[part], high[part], a); }
};
template <>
struct Step<bf16, int8> : ByteStep<int8> {};
template <>
struct Step<bf16, e4m3> : ByteStep<e4m3> {};

SKINNIES(bf16, int8, bf16_int8, 1)
SKINNIES(bf16, e4m3, bf16_e4m3, 1)

// Grid: rows. Weights in the type of activations.
template <typename T, typename W>
static __device__ __forceinline__ void widen(const W *bytes, const float *units_of_rows, T *to, int columns) {
    float unit = units_of_rows[blockIdx.x];
    const W *from = bytes + (i64)blockIdx.x * columns;
    T *out = to + (i64)blockIdx.x * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        u32 pair = widen_pair(((const unsigned char *)from)[i], false, W());
        out[i] = Of<T>::f32(__uint_as_float(pair << 16) * unit);
    }
}

// The same of columns in eights, eight by a thread.
template <typename T, typename W>
static __device__ __forceinline__ void widen_eights(const W *bytes, const float *units_of_rows, T *to, int columns) {
    float unit = units_of_rows[blockIdx.x];
    for (int i = 8 * threadIdx.x; i < columns; i += 8 * blockDim.x) {
        i64 at = (i64)blockIdx.x * columns + i;
        uint2 eight = *(const uint2 *)(bytes + at);
        float v[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 pair = widen_pair(j < 2 ? eight.x : eight.y, j & 1, W());
            v[2 * j] = __uint_as_float(pair << 16) * unit, v[2 * j + 1] = __uint_as_float(pair & 0xffff0000) * unit;
        }
        const int P = Pack<T>::N;
#pragma unroll
        for (int j = 0; j < 8 / P; j++) store(to + at + j * P, v + j * P);
    }
}

#define WIDEN(T, W)                                                                                                    \
    extern "C" __global__ void widen_##T##_##W(const W *bytes, const float *units_of_rows, T *to, int columns) {       \
        if (columns % 8) widen<T, W>(bytes, units_of_rows, to, columns);                                               \
        else widen_eights<T, W>(bytes, units_of_rows, to, columns);                                                    \
    }
typedef float f32;
WIDEN(bf16, int8)
WIDEN(bf16, e4m3)
WIDEN(f16, int8)
WIDEN(f16, e4m3)
WIDEN(f32, int8)
WIDEN(f32, e4m3)
