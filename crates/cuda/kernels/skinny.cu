// Matmuls of few rows, as decoding has them: y = x · wᵀ at the speed at which w is read. The matrix units take 16 rows of w and 8 of x at a time;
// what is missing of 8 rows of x is zero. Warps of a block share the depth, and their sums are added in order. Nothing but the shape of w and the
// room for rows decides how a sum is cut, so in calls with the same room the bits of a row do not depend on the rows beside it.

// A step of a warp: 64 elements of 16 rows of w, of which a lane has 8 and 8 of two rows. Which element of the depth is which does not matter to a sum
// as long as both factors agree.
const int STEP = 64;

static __device__ __forceinline__ uint4 stream16(const void *from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

// Grid: rows of w ÷ (16 · TILES). `N` is how many times 8 rows of x there may be; TILES of 16 rows of w are a block's.
template <typename T, int N, int TILES, int SKINNY_WARPS, int AT_ONCE>
static __device__ void skinny(const T *x, const T *w, T *y, int rows, int outputs, int depth) {
    const int SHARES = SKINNY_WARPS / TILES;
    __shared__ float sums[SKINNY_WARPS][16][8 * N + 1];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int tile = warp % TILES, share = warp / TILES;
    i64 first = (i64)(blockIdx.x * TILES + tile) * 16;
    float c[N][4] = {};
    bool waited = false;
    let_next_begin();
    if (first < outputs) {
        const T *low = w + (first + g) * depth + t * 8, *high = low + (i64)8 * depth;
        for (int k0 = share * STEP; k0 < depth; k0 += SHARES * STEP * AT_ONCE) {
            uint4 a[AT_ONCE][4];
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                int k = k0 + s * SHARES * STEP;
                if (k >= depth) break;
                a[s][0] = stream16(low + k), a[s][1] = stream16(high + k);
                a[s][2] = stream16(low + k + 32), a[s][3] = stream16(high + k + 32);
            }
            // The first weights come while the kernel before still makes x.
            if (!waited) wait_for_those_before();
            waited = true;
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                int k = k0 + s * SHARES * STEP;
                if (k >= depth) break;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    int row = 8 * j + g;
                    const T *from = x + (i64)row * depth + k + t * 8;
                    uint4 zero = {0, 0, 0, 0};
                    uint4 b = row < rows ? *(const uint4 *)from : zero, d = row < rows ? *(const uint4 *)(from + 32) : zero;
                    units<T>(c[j], a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, b.x, b.y);
                    units<T>(c[j], a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, b.z, b.w);
                    units<T>(c[j], a[s][2].x, a[s][3].x, a[s][2].y, a[s][3].y, d.x, d.y);
                    units<T>(c[j], a[s][2].z, a[s][3].z, a[s][2].w, a[s][3].w, d.z, d.w);
                }
            }
        }
    }
    if (!waited) wait_for_those_before();
#pragma unroll
    for (int j = 0; j < N; j++) {
        sums[warp][g][8 * j + 2 * t] = c[j][0], sums[warp][g][8 * j + 2 * t + 1] = c[j][1];
        sums[warp][g + 8][8 * j + 2 * t] = c[j][2], sums[warp][g + 8][8 * j + 2 * t + 1] = c[j][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TILES * rows; i += blockDim.x) {
        int at = i % (16 * TILES), row = i / (16 * TILES);
        i64 output = (i64)blockIdx.x * TILES * 16 + at;
        if (output >= outputs) continue;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SHARES; s++) sum += sums[s * TILES + at / 16][at % 16][row];
        y[row * (i64)outputs + output] = Of<T>::f32(sum);
    }
}

// More warps hide more of the time that reading takes; more rows of x need more registers.
#define SKINNY(T, NAME, N, TILES, WARPS, AT_ONCE)                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                           \
        skinny_##N##_##TILES##_##NAME(const T *x, const T *w, T *y, int rows, int outputs, int depth) {                \
        skinny<T, N, TILES, WARPS, AT_ONCE>(x, w, y, rows, outputs, depth);                                            \
    }
#define ALL_SKINNY(T, NAME)                                                                                            \
    SKINNY(T, NAME, 1, 1, 16, 2) SKINNY(T, NAME, 1, 4, 16, 2) SKINNY(T, NAME, 2, 1, 8, 4) SKINNY(T, NAME, 2, 4, 8, 4)  \
        SKINNY(T, NAME, 4, 1, 8, 4) SKINNY(T, NAME, 4, 4, 8, 4)
ALL_SKINNY(bf16, bf16)
ALL_SKINNY(f16, f16)
