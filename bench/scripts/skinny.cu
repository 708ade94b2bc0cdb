// Times the matmuls of 32 rows and of one of `skinny.cuh` alone, with the shapes of a model of 1B: 48 launches in a graph, each begun early as in a program.
// Compiled by `skinny.sh`, after the sources of the kernels.
struct Shape {
    const char *name;
    void *kernel;
    // As the macro has them.
    int tiles, warps, stages, split, outputs, depth;
    bool glu, norm;
};

static float timed(Shape s, int rows, char *w, size_t wbytes, void *x, void *y) {
    cudaStream_t st; cudaStreamCreate(&st);
    size_t one = (size_t)s.outputs * s.depth * 2 * (s.glu ? 2 : 1);
    int copies = (int)(wbytes / one), of_block = (s.glu ? 8 : 16) * s.tiles;
    size_t shared = (size_t)s.warps * s.stages * s.tiles * 2048 + (s.norm ? rows * s.depth * 2 : 0);
    cudaFuncSetAttribute(s.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    const int N = 48;
    cudaGraph_t g; cudaGraphExec_t e;
    cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < N; i++) {
        void *wi = w + (size_t)(i % copies) * one, *none = 0;
        int outputs = s.outputs, depth = s.depth;
        float eps = 1e-5f, plus = 0.0f;
        cudaLaunchConfig_t c = {};
        c.gridDim = dim3((outputs + of_block - 1) / of_block * s.split);
        c.blockDim = dim3(32 * s.warps); c.dynamicSmemBytes = shared; c.stream = st;
        cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; a[0].val.programmaticStreamSerializationAllowed = 1;
        c.attrs = a; c.numAttrs = 1;
        void *plain[] = {&x, &wi, &none, &none, &y, &rows, &outputs, &depth};
        void *normed[] = {&x, &none, &x, &none, &wi, &none, &y, &rows, &outputs, &depth, &eps, &plus};
        cudaLaunchKernelExC(&c, s.kernel, s.norm ? normed : plain);
    }
    cudaStreamEndCapture(st, &g); cudaGraphInstantiate(&e, g, 0);
    cudaEvent_t b, f; cudaEventCreate(&b); cudaEventCreate(&f);
    float best = 1e9;
    for (int r = 0; r < 12; r++) { cudaEventRecord(b, st); cudaGraphLaunch(e, st); cudaEventRecord(f, st); cudaEventSynchronize(f); float ms; cudaEventElapsedTime(&ms, b, f); if (r > 2 && ms < best) best = ms; }
    if (cudaGetLastError()) printf("error ");
    return best * 1000 / N;
}
int main() {
    size_t wbytes = (size_t)2 << 30; char *w; void *x, *y;
    cudaMalloc((void **)&w, wbytes); cudaMalloc(&x, 32 * 16384 * 2); cudaMalloc(&y, (size_t)32 * 131072 * 2);
    cudaMemset(w, 0, wbytes); cudaMemset(x, 0, 32 * 16384 * 2);
#define OF(KIND) (void *)skinny_##KIND##_bf16
    Shape many[] = {{"qkv 3072x2048", OF(4_narrow), 2, 8, 3, 2, 3072, 2048, false, false}, {"o 2048x2048", OF(4_narrow), 2, 8, 3, 2, 2048, 2048, false, false},
        {"glu 8192x2048", OF(4_glu), 4, 4, 3, 1, 8192, 2048, true, false}, {"down 2048x8192", OF(4_deep), 2, 4, 4, 4, 2048, 8192, false, false},
        {"head 128256x2048", OF(4_wide), 4, 4, 2, 1, 128256, 2048, false, false}};
    Shape one[] = {{"qkv with norm", OF(norm_narrow), 1, 16, 2, 1, 3072, 2048, false, true}, {"o", OF(1_narrow), 1, 16, 2, 1, 2048, 2048, false, false},
        {"glu with norm", OF(norm_glu), 2, 8, 2, 1, 8192, 2048, true, true}, {"down", OF(1_deep), 1, 32, 2, 1, 2048, 8192, false, false},
        {"head with norm", OF(norm_wide), 2, 8, 2, 1, 128256, 2048, false, true}};
    for (int rows : {32, 1}) {
        float sum = 0;
        for (auto s : rows == 1 ? one : many) {
            float us = timed(s, rows, w, wbytes, x, y);
            sum += us * (s.outputs > 100000 ? 1 : 16);
            cudaFuncAttributes a; cudaFuncGetAttributes(&a, s.kernel);
            printf("%s %.2f us (%d regs)  ", s.name, us, a.numRegs);
        }
        printf("token %.0f us, %d rows\n", sum, rows);
    }
}
