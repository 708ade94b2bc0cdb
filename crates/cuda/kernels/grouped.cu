// The grouped matmuls of `grouped.cuh`, in bf16 and f16.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// WEIGHT has two maps: of x in the order of rows, and of sums in f32.
#define GROUPED(T, NAME, KIND, CLUSTER)                                                                                \
    extern "C" __global__ void CLUSTER __launch_bounds__(384, 1)                                                       \
        grouped_##NAME##_##T(const __grid_constant__ TensorMaps maps, const u8 *a, void *out, const int *order,        \
                             const int *starts, int experts, int columns, int depth, int lines, int sharers, int kind, \
                             int add) {                                                                                \
        Args g = {a, out, order, starts, experts, columns, depth, lines, sharers, kind, add, 0, 0};                    \
        grouped<T, T, KIND>(&maps.from, &maps.to, g);                                                                  \
    }
#define GROUPED_OF(T)                                                                                                  \
    GROUPED(T, forward, FORWARD, )                                                                                     \
    GROUPED(T, input, INPUT, )                                                                                         \
    GROUPED(T, weight, WEIGHT, __cluster_dims__(2, 1, 1))
GROUPED_OF(bf16)
GROUPED_OF(f16)
#endif
