// Gradient accumulators: float, bf16, or 64-bit fixed point with 2^-36 as unit.

enum Sum { SUM_F32 = 0, SUM_BF16 = 1, SUM_FIXED = 2 };

const i64 POISON = (i64)1 << 63;
const i64 LIMIT = (i64)1 << 62;
const float FIXED_SCALE = 68719476736.0f;

static __device__ __forceinline__ i64 fixed_merge(i64 a, i64 b) {
    i64 next = (i64)((u64)a + (u64)b);
    bool outside = next > LIMIT || next < -LIMIT;
    return a == POISON || b == POISON || outside ? POISON : next;
}

static __device__ __forceinline__ i64 fixed_of(float x) {
    float scaled = x * FIXED_SCALE;
    return fabsf(scaled) < (float)LIMIT ? __double2ll_rn((double)scaled) : POISON;
}

static __device__ __forceinline__ float fixed_to(i64 x) {
    return x == POISON ? __uint_as_float(0x7fc00000u) : (float)x * (1.0f / FIXED_SCALE);
}

static __device__ __forceinline__ float sum_read(const void *p, int kind, i64 i) {
    if (kind == SUM_F32) return ((const float *)p)[i];
    if (kind == SUM_BF16) return to_f32(((const bf16 *)p)[i]);
    return fixed_to(((const i64 *)p)[i]);
}

// Adds to an accumulator, or replaces what is there.
static __device__ __forceinline__ void sum_write(void *p, int kind, i64 i, float x, int add) {
    if (kind == SUM_F32) {
        float *at = (float *)p + i;
        *at = add ? *at + x : x;
    } else if (kind == SUM_BF16) {
        bf16 *at = (bf16 *)p + i;
        *at = Of<bf16>::f32(add ? to_f32(*at) + x : x);
    } else {
        i64 *at = (i64 *)p + i;
        *at = fixed_merge(add ? *at : 0, fixed_of(x));
    }
}
