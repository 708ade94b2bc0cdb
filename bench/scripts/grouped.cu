// Grouped matmuls of experts (crates/cuda/kernels/grouped.cu) beside one dense cuBLAS matmul of the same FLOPs, each for 0.3 s after 0.3 s of it, so
// that the chip is at the clock of a long run. Every result is checked against sums in f64 at random places. Run by bench/scripts/grouped.sh.
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH_FEAT_SM90_ALL // the host sees the kernels too
#endif
#include "../../crates/cuda/kernels/common.cuh"
#include "../../crates/cuda/kernels/sums.cuh"
namespace rows_of {
#include "../../crates/cuda/kernels/experts.cu"
}
namespace tiles {
#include "../../crates/cuda/kernels/hopper.cuh"
#include "../../crates/cuda/kernels/grouped.cuh"
#include "../../crates/cuda/kernels/grouped.cu"
}

typedef __nv_bfloat16 Bf16;
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        auto status = (call);                                                                                          \
        if (status) {                                                                                                  \
            printf("%s, line %d: error %d\n", #call, __LINE__, (int)status);                                           \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

template <class T>
static T *room(size_t elements) {
    void *p;
    CHECK(cudaMalloc(&p, elements * sizeof(T)));
    CHECK(cudaMemset(p, 0xff, elements * sizeof(T)));
    return (T *)p;
}

static tiles::TensorMap map_of(void *p, bool f32, std::vector<cuuint64_t> sizes, std::vector<cuuint32_t> box) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                               const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode = (Encode)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled");
    alignas(64) CUtensorMap map;
    std::vector<cuuint64_t> strides;
    cuuint64_t stride = f32 ? 4 : 2;
    for (size_t i = 0; i + 1 < sizes.size(); i++) strides.push_back(stride *= sizes[i]);
    cuuint32_t ones[] = {1, 1, 1};
    CHECK(encode(&map, f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizes.size(), p, sizes.data(),
                 strides.data(), box.data(), ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    tiles::TensorMap result;
    memcpy(&result, &map, sizeof result);
    return result;
}

__host__ __device__ static u64 mix(u64 x) {
    x *= 0x9E3779B97F4A7C15ull, x ^= x >> 31, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

__global__ void draw(Bf16 *p, i64 n, u64 seed, float scale) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        p[i] = __float2bfloat16((((mix(i + seed) >> 40) & 0xffff) / 65536.f - 0.5f) * scale);
}

enum Product { Y, DX, DW };

struct Problem {
    int experts, n, k, rows, sharers;
    Bf16 *x, *w, *dy;
    u32 *chosen;
};

// Adds to error[0] the squared differences of `samples` entries, to error[1] the squares of what they should be.
__global__ void compare(Problem p, Product product, const void *out, double *error, int samples) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= samples) return;
    u64 z = mix(i + 77);
    double is = 0, should = 0;
    auto of = [](const Bf16 *v, i64 at) { return (double)__bfloat162float(v[at]); };
    if (product == DW) {
        int e = z % p.experts, n = (z >> 20) % p.n, k = (z >> 40) % p.k;
        for (int r = 0; r < p.rows; r++)
            if ((int)p.chosen[r] == e) should += of(p.dy, (i64)r * p.n + n) * of(p.x, (i64)(r / p.sharers) * p.k + k);
        is = ((const float *)out)[((i64)e * p.n + n) * p.k + k];
    } else {
        int r = z % p.rows, wide = product == Y ? p.n : p.k, at = (z >> 32) % wide;
        const Bf16 *w = p.w + (i64)p.chosen[r] * p.n * p.k;
        if (product == Y)
            for (int k = 0; k < p.k; k++) should += of(p.x, (i64)(r / p.sharers) * p.k + k) * of(w, (i64)at * p.k + k);
        else
            for (int n = 0; n < p.n; n++) should += of(p.dy, (i64)r * p.n + n) * of(w, (i64)n * p.k + at);
        is = of((const Bf16 *)out, (i64)r * wide + at);
    }
    atomicAdd(error, is == is ? (should - is) * (should - is) : 1e30);
    atomicAdd(error + 1, should * should);
}

template <class F>
static double microseconds(F f) {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    auto time = [&](int times) {
        float ms = 0;
        cudaEventRecord(begin);
        for (int i = 0; i < times; i++) f();
        cudaEventRecord(end);
        CHECK(cudaEventSynchronize(end));
        cudaEventElapsedTime(&ms, begin, end);
        return ms / times;
    };
    f();
    int times = std::clamp((int)(300 / time(4)), 8, 3000);
    time(times);
    return 1e3 * time(times);
}

// `skew`: how unevenly experts are chosen; past 0.7 one is never chosen.
static void measure(const char *name, int experts, int n, int k, int tokens, int top, bool shared, double skew, cublasHandle_t blas) {
    int rows = tokens * top, sharers = shared ? top : 1, of_x = rows / sharers, places = rows + experts * rows_of::TILE;
    srand(3);
    std::vector<double> weights(experts);
    double sum = 0;
    for (int e = 0; e < experts; e++) sum += weights[e] = skew > 0.7 && e == experts / 2 ? 0 : exp(skew * 4 * (rand() / (double)RAND_MAX - .5));
    std::vector<u32> chosen(rows);
    for (auto &choice : chosen) {
        double at = sum * rand() / RAND_MAX;
        for (choice = 0; (int)choice < experts - 1 && at >= weights[choice]; choice++) at -= weights[choice];
        if (weights[choice] == 0) choice = 0;
    }
    Problem p = {experts, n, k, rows, sharers, room<Bf16>((i64)of_x * k), room<Bf16>((i64)experts * n * k),
                 room<Bf16>((i64)rows * n), room<u32>(rows)};
    auto *y = room<Bf16>((i64)rows * n), *dx = room<Bf16>((i64)rows * k), *sorted = room<Bf16>((i64)places * k);
    auto *dw = room<float>((i64)experts * n * k);
    int *order = room<int>(places), *starts = room<int>(3 * experts + 1), *places_of = room<int>(rows);
    u32 *counts = room<u32>(256 * experts);
    double *error = room<double>(2);
    CHECK(cudaMemcpy(p.chosen, chosen.data(), rows * 4, cudaMemcpyHostToDevice));
    draw<<<512, 256>>>(p.x, (i64)of_x * k, 1, 2);
    draw<<<512, 256>>>(p.w, (i64)experts * n * k, 2, 0.2f);
    draw<<<512, 256>>>(p.dy, (i64)rows * n, 3, 2);

    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    int blocks = device.multiProcessorCount / 2 * 2, each = ((rows + 255) / 256 + 1023) / 1024 * 1024, shares = (rows + each - 1) / each;
    cuuint64_t N = n, K = k, E = experts;
    auto weights_by_lines = map_of(p.w, false, {K, E * N}, {64, 256}), weights_by_boxes = map_of(p.w, false, {K, E * N}, {64, 64});
    auto of_sorted = map_of(sorted, false, {K, (cuuint64_t)places}, {64, 64}), of_sums = map_of(dw, true, {K, N, E}, {32, 64, 1});
    auto sort = [&] {
        rows_of::count_rows<<<shares, 1024>>>(p.chosen, counts, rows, each, experts, rows, experts);
        rows_of::place_rows<<<shares, 1024>>>(p.chosen, counts, order, starts, places_of, rows, each, experts, rows, experts);
    };
    const int threads = 384, memory = sizeof(tiles::Shared);
    auto forward = [&] {
        tiles::grouped_forward_bf16<<<blocks, threads, memory>>>({weights_by_lines, {}}, (u8 *)p.x, y, order, starts, experts, n, k, 0, sharers, 0, 0);
    };
    auto input = [&] {
        tiles::grouped_input_bf16<<<blocks, threads, memory>>>({weights_by_boxes, {}}, (u8 *)p.dy, dx, order, starts, experts, k, n, 0, 1, 0, 0);
    };
    auto scatter = [&] {
        rows_of::scatter_rows<<<experts + (of_x + 7) / 8, 256>>>((Pack<u16> *)p.x, (Pack<u16> *)sorted, places_of, starts, rows, experts, k / 8, sharers);
    };
    auto weight = [&](int add) {
        scatter();
        tiles::grouped_weight_bf16<<<blocks, threads, memory>>>({of_sorted, of_sums}, (u8 *)p.dy, dw, order, starts, experts, k, 0, n, 1, SUM_F32, add);
    };
    auto off = [&](Product product, const void *out) {
        double sums[2];
        CHECK(cudaMemset(error, 0, 16));
        int samples = product == DW ? 512 : 8192;
        compare<<<samples / 256, 256>>>(p, product, out, error, samples);
        CHECK(cudaMemcpy(sums, error, 16, cudaMemcpyDeviceToHost));
        return sqrt(sums[0] / sums[1]);
    };
    sort(), forward(), input(), weight(0);
    CHECK(cudaDeviceSynchronize());
    double worst = std::max(off(Y, y), off(DX, dx)), of_weight = off(DW, dw);
    weight(1);
    double twice = off(DW, dw);
    if (!(worst < 3e-3 && of_weight < 1e-4 && fabs(twice - 1) < 1e-4)) {
        printf("%s: WRONG: y, dx off by %g, dw by %g; added twice by %g of itself\n", name, worst, of_weight, twice);
        exit(1);
    }
    float one = 1, zero = 0;
    auto dense = [&](cublasOperation_t a, cublasOperation_t b, int m, int columns, int depth, void *left, int from, void *right, int other,
                     void *out, cudaDataType type) {
        CHECK(cublasGemmEx(blas, a, b, m, columns, depth, &one, left, CUDA_R_16BF, from, right, CUDA_R_16BF, other, &zero, out, type, m,
                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    };
    // As many rows of x as of y, whatever is in them; dw is one expert's.
    auto *wide_x = sharers == 1 ? p.x : room<Bf16>((i64)rows * k);
    draw<<<512, 256>>>(wide_x, (i64)rows * k, 1, 2);
    double ours[] = {microseconds(forward), microseconds(input), microseconds([&] { weight(0); })};
    double theirs[] = {microseconds([&] { dense(CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, p.w, k, wide_x, k, y, CUDA_R_16BF); }),
                       microseconds([&] { dense(CUBLAS_OP_N, CUBLAS_OP_N, k, rows, n, p.w, k, p.dy, n, dx, CUDA_R_16BF); }),
                       microseconds([&] { dense(CUBLAS_OP_N, CUBLAS_OP_T, k, n, rows, wide_x, k, p.dy, n, dw, CUDA_R_32F); })};
    double of_scatter = microseconds(scatter), flops = 2.0 * rows * n * k, all = 0, all_theirs = 0;
    printf("%-38s", name);
    for (int i = 0; i < 3; i++) {
        printf(" %5.0f, %.3f", flops / ours[i] * 1e-6, theirs[i] / ours[i]);
        all += ours[i], all_theirs += theirs[i];
    }
    printf("  %.3f", all_theirs / all);
    for (double us : theirs) printf(" %5.0f", flops / us * 1e-6);
    printf("  %6.1f %6.1f\n", microseconds(sort), of_scatter);
    if (wide_x != p.x) cudaFree(wide_x);
    for (void *pointer : std::initializer_list<void *>{p.x, p.w, p.dy, p.chosen, y, dx, sorted, dw, order, starts, places_of, counts, error}) cudaFree(pointer);
}

int main() {
    for (const void *kernel : {(const void *)tiles::grouped_forward_bf16, (const void *)tiles::grouped_input_bf16, (const void *)tiles::grouped_weight_bf16})
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(tiles::Shared)));
    cublasHandle_t blas;
    CHECK(cublasCreate(&blas));
    printf("TFLOP/s and their ratio to the dense one; dw with the sorting of x\n%-38s %12s %12s %12s %6s %17s %14s\n", "", "y", "dx", "dw", "all", "dense y, dx, dw", "sort, x in us");
    measure("gate and up, 65,536 rows", 32, 2048, 2048, 16384, 4, true, 0, blas);
    measure("down, 65,536 rows", 32, 2048, 1024, 16384, 4, false, 0, blas);
    measure("gate and up, 131,072 rows", 32, 2048, 2048, 32768, 4, true, 0, blas);
    measure("down, 131,072 rows", 32, 2048, 1024, 32768, 4, false, 0, blas);
    measure("gate and up, uneven", 32, 2048, 2048, 16384, 4, true, 1.0, blas);
    measure("down, uneven", 32, 2048, 1024, 16384, 4, false, 1.0, blas);
    measure("128 x 1536 x 2048, 131,072 rows", 128, 1536, 2048, 16384, 8, true, 0.3, blas);
    measure("8 x 28672 x 4096, 8,192 rows", 8, 28672, 4096, 4096, 2, true, 0.2, blas);
    measure("8 x 320 x 448, 1,554 rows, uneven", 8, 320, 448, 777, 2, true, 0.8, blas);
}
