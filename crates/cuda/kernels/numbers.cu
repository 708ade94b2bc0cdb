// Whether numbers are finite, by their bits: one is not whose bits under `mask` are `bad`, unless they are `allowed` as a whole.

template <typename T>
static __device__ __forceinline__ void find_first(const T *x, i64 n, T mask, T bad, T allowed, u64 *first) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        T bits = x[i];
        if ((bits & mask) == bad && bits != allowed) {
            atomicMin(first, (u64)i);
            return;
        }
    }
}

// The least index of such a number goes to `first`, which is larger than any before.
#define NOT_FINITE(BYTES, T)                                                                                          \
    extern "C" __global__ void not_finite_##BYTES(const T *x, i64 n, T mask, T bad, T allowed, u64 *first) {          \
        find_first<T>(x, n, mask, bad, allowed, first);                                                               \
    }
NOT_FINITE(2, u16)
NOT_FINITE(4, u32)
NOT_FINITE(8, u64)
