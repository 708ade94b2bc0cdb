// Times the matmuls of 32 rows of `skinny.cuh` alone, with the shapes of a model of 1B: 48 launches in a graph, each begun early as in a program. Compiled by
// `skinny.sh`, after the sources of the kernels.
struct Shape {
    const char *name;
    void *kernel;
    int tiles, warps, outputs, depth;
    bool glu;
};

static float timed(Shape s, int rows, char *w, size_t wbytes, void *x, void *y) {
    cudaStream_t st; cudaStreamCreate(&st);
    size_t one = (size_t)s.outputs * s.depth * 2 * (s.glu ? 2 : 1);
    int copies = (int)(wbytes / one);
    const int N = 48;
    cudaGraph_t g; cudaGraphExec_t e;
    cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < N; i++) {
        void *wi = w + (size_t)(i % copies) * one, *bias = 0, *un = 0;
        int outputs = s.outputs, depth = s.depth;
        cudaLaunchConfig_t c = {};
        c.gridDim = dim3((outputs + (s.glu ? 8 : 16) * s.tiles - 1) / ((s.glu ? 8 : 16) * s.tiles));
        c.blockDim = dim3(32 * s.warps); c.stream = st;
        cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; a[0].val.programmaticStreamSerializationAllowed = 1;
        c.attrs = a; c.numAttrs = 1;
        void *args[] = {&x, &wi, &un, &bias, &y, &rows, &outputs, &depth};
        cudaLaunchKernelExC(&c, s.kernel, args);
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
    Shape all[] = {{"qkv 3072x2048", (void *)skinny_4_narrow_bf16, 1, 8, 3072, 2048, false}, {"o 2048x2048", (void *)skinny_4_narrow_bf16, 1, 8, 2048, 2048, false},
        {"glu 8192x2048", (void *)skinny_4_glu_bf16, 4, 8, 8192, 2048, true}, {"down 2048x8192", (void *)skinny_4_deep_bf16, 1, 16, 2048, 8192, false},
        {"head 128256x2048", (void *)skinny_4_wide_bf16, 8, 8, 128256, 2048, false}};
    float sum = 0;
    for (auto s : all) { float us = timed(s, 32, w, wbytes, x, y); printf("%s %.2f  ", s.name, us); sum += us * (s.outputs > 100000 ? 1 : 16);
        cudaFuncAttributes a; cudaFuncGetAttributes(&a, s.kernel); printf("(%d regs)  ", a.numRegs); }
    printf("token %.0f us\n", sum);
}
