/* A driver, compiler and libraries without a device, for tests of everything around the kernels.
 *
 * One library is all of them: a test copies it under the names that Lockstep looks for. Streams are in device.c, NCCL is in nccl.c. Device memory is memory of the host,
 * copies happen at once, kernels and graphs do nothing, so losses and norms are zero. The environment says what goes wrong:
 *
 *   FAKE_CUDA_VERSION   what the driver speaks, as 1000 x major + 10 x minor (13000)
 *   FAKE_CUDA_DEVICES   how many devices there are (1)
 *   FAKE_CUDA_MEMORY    bytes of memory (1 GiB)
 *   FAKE_CUDA_LARGEST   bytes of the largest piece that can be had of it (all)
 *   FAKE_CUDA_FAIL      FUNCTION:N=STATUS  from the Nth call on, this function gives this status
 *   FAKE_CUDA_LOSE      FUNCTION:N=STATUS  the Nth call succeeds, and every later call of anything that the device has to do
 *                                          with gives this status: what a kernel that goes wrong looks like
 *   FAKE_CUDA_CAPTURE   FUNCTION:N=STATUS  the same as FAKE_CUDA_FAIL, of calls while a graph is captured
 *   FAKE_CUDA_COUNT     FUNCTION  at the end, how often it was called is printed
 *   FAKE_CUDA_STUCK     FUNCTION:N=1  from the Nth call on the device does nothing more: what waits for it waits for ever. The
 *                                     function "passed" is a mark that the device comes to, in a graph too
 *   FAKE_CUDNN_VERSION  cuDNN's version, as 10000 x major + 100 x minor + patch (91400)
 *   FAKE_NCCL_VERSION   NCCL's version, the same way (22809)
 *   FAKE_NCCL_LOG       the start of the name of a file per rank, into which it writes its device and what it asks NCCL for
 *   FAKE_NCCL_ABORT     seconds that it takes to abort a communicator (0)
 *   FAKE_NCCL_WORLD     the file that ranks share, see nccl.c
 *   FAKE_NCCL_LIMIT     seconds after which a rank that never comes is told (30)
 *
 * A graph does not start while another stream than its own has copies to the device that nobody waited for: what it reads may not be
 * there.
 *
 * A function that Lockstep starts to use is one line below: OK where nothing is to be done, HOST where a lost device does not
 * matter besides, MAKE where it gives a handle, GIVE where it gives a number. */

#include "fake.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t address;

size_t fake_number(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* FUNCTION:N=STATUS, and how many calls of it there were. */
struct fault {
    int known, count, at, status;
    char function[96];
};

static int due(struct fault *fault, const char *variable, const char *function) {
    if (!fault->known) {
        const char *text = getenv(variable);
        if (!text || sscanf(text, "%95[^:]:%d=%d", fault->function, &fault->at, &fault->status) != 3)
            fault->function[0] = 0;
        fault->known = 1;
    }
    return !strcmp(fault->function, function) && __atomic_add_fetch(&fault->count, 1, __ATOMIC_SEQ_CST) >= fault->at;
}

static int lost, counted;
int fake_capturing, fake_stuck;
/* Streams with copies to the device that nobody waited for. */
static int behind;

__attribute__((destructor)) static void print_count(void) {
    if (counted)
        fprintf(stderr, "fake: %s was called %d times\n", getenv("FAKE_CUDA_COUNT"), counted);
}

int fake_called(const char *function) {
    static struct fault fail, lose, capture, stick;
    const char *count = getenv("FAKE_CUDA_COUNT");
    if (count && !strcmp(count, function))
        __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    /* cuBLASLt has statuses of its own: execution failed. */
    if (lost)
        return strncmp(function, "cublasLt", 8) ? lost : 13;
    if (due(&fail, "FAKE_CUDA_FAIL", function))
        return fail.status;
    if (fake_capturing && due(&capture, "FAKE_CUDA_CAPTURE", function))
        return capture.status;
    if (due(&stick, "FAKE_CUDA_STUCK", function))
        fake_stuck = 1;
    if (due(&lose, "FAKE_CUDA_LOSE", function))
        lost = lose.status;
    return 0;
}

void fake_write_down(const char *what, const char *more, unsigned long long n) {
    const char *start = getenv("FAKE_NCCL_LOG"), *rank = getenv("RANK");
    if (!start)
        return;
    char path[4096];
    snprintf(path, sizeof path, "%s%s", start, rank ? rank : "");
    FILE *file = fopen(path, "a");
    if (!file)
        return;
    fprintf(file, "%s %s %llu\n", what, more, n);
    fclose(file);
}

/* Does nothing, whatever it is given. */
#define OK(name) \
    int name() { return fake_called(__func__); }
/* The same, on the host alone: a lost device does not matter. */
#define HOST(name)                      \
    int name() {                        \
        int status = fake_called(__func__);  \
        return lost ? 0 : status;       \
    }
/* Gives a value as its first, second or third argument. */
#define GIVE(name, type, value)      \
    int name(type *out) {            \
        TRY;                         \
        *out = (type)(value);        \
        return 0;                    \
    }
#define GIVE_2(name, type, value)               \
    int name(intptr_t first, type *out) {       \
        (void)first;                            \
        TRY;                                    \
        *out = (type)(value);                   \
        return 0;                               \
    }
#define GIVE_3(name, type, value)                              \
    int name(intptr_t first, intptr_t second, type *out) {     \
        (void)first, (void)second;                             \
        TRY;                                                   \
        *out = (type)(value);                                  \
        return 0;                                              \
    }
/* Gives a handle. */
#define MAKE(name) GIVE(name, void *, malloc(8))

/* ---- the driver ---- */

static size_t memory_used;

int cuInit(unsigned flags) {
    (void)flags;
    TRY;
    return fake_number("FAKE_CUDA_DEVICES", 1) ? 0 : 100;
}
GIVE(cuDriverGetVersion, int, fake_number("FAKE_CUDA_VERSION", 13000))
GIVE(cuDeviceGetCount, int, fake_number("FAKE_CUDA_DEVICES", 1))
int cuDeviceGet(int *device, int ordinal) {
    TRY;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    TRY;
    snprintf(name, (size_t)size, "NVIDIA H200 (fake)");
    return 0;
}
int cuDeviceGetPCIBusId(char *name, int size, int device) {
    TRY;
    snprintf(name, (size_t)size, "0000:%02x:00.0", device + 1);
    return 0;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    TRY;
    switch (which) {
    case 16: *value = 132; break; /* multiprocessors */
    case 75: *value = (int)fake_number("FAKE_CUDA_CAPABILITY", 90) / 10; break;
    case 76: *value = (int)fake_number("FAKE_CUDA_CAPABILITY", 90) % 10; break;
    case 97: *value = 227 << 10; break; /* shared memory of a block, where asked for */
    default: *value = 1;
    }
    return 0;
}
GIVE(cuDeviceTotalMem_v2, size_t, fake_number("FAKE_CUDA_MEMORY", 1u << 30))
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    TRY;
    *total = fake_number("FAKE_CUDA_MEMORY", 1u << 30);
    *available = *total - memory_used;
    return 0;
}
/* What the device has allocated: by this a copy knows its direction. */
enum { BLOCKS = 256 };
static struct block {
    address from, to;
} blocks[BLOCKS];
static void keep_block(address from, address to) {
    for (int i = 0; i < BLOCKS; i++) {
        address none = 0;
        if (__atomic_compare_exchange_n(&blocks[i].from, &none, from, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            __atomic_store_n(&blocks[i].to, to, __ATOMIC_SEQ_CST);
            return;
        }
    }
}
static void forget_block(address from) {
    for (int i = 0; i < BLOCKS; i++)
        if (__atomic_load_n(&blocks[i].from, __ATOMIC_SEQ_CST) == from) {
            __atomic_store_n(&blocks[i].to, 0, __ATOMIC_SEQ_CST);
            __atomic_store_n(&blocks[i].from, 0, __ATOMIC_SEQ_CST);
        }
}
static int on_device(address at) {
    for (int i = 0; i < BLOCKS; i++) {
        address from = __atomic_load_n(&blocks[i].from, __ATOMIC_SEQ_CST);
        if (from && from <= at && at < __atomic_load_n(&blocks[i].to, __ATOMIC_SEQ_CST))
            return 1;
    }
    return 0;
}
int cuMemAlloc_v2(address *at, size_t bytes) {
    TRY;
    size_t total = fake_number("FAKE_CUDA_MEMORY", 1u << 30);
    if (bytes > total - memory_used || bytes > fake_number("FAKE_CUDA_LARGEST", total))
        return 2;
    /* Pages that nobody touches cost nothing. */
    size_t *block = mmap(NULL, bytes + 256, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED)
        return 2;
    *block = bytes;
    memory_used += bytes;
    *at = (address)(uintptr_t)block + 256;
    keep_block(*at, *at + bytes);
    return 0;
}
int cuMemFree_v2(address at) {
    TRY;
    forget_block(at);
    size_t *block = (size_t *)(uintptr_t)(at - 256);
    size_t bytes = *block;
    memory_used -= bytes;
    munmap(block, bytes + 256);
    return 0;
}
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) {
    (void)flags;
    TRY;
    *at = calloc(1, bytes);
    return *at ? 0 : 2;
}
int cuMemAllocHost_v2(void **at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }
int cuMemFreeHost(void *at) {
    TRY;
    free(at);
    return 0;
}
static int copy(const char *function, address to, address from, size_t bytes) {
    int status = fake_called(function);
    if (!status)
        memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return status;
}
/* Addresses of the host and of the device are the same. */
#define COPY(name) \
    int name(address to, address from, size_t bytes) { return copy(__func__, to, from, bytes); }
COPY(cuMemcpy)
COPY(cuMemcpyHtoD_v2)
int cuMemcpyHtoDAsync_v2(address to, address from, size_t bytes, struct stream *stream) {
    TRY;
    memcpy((void *)to, (void *)from, bytes);
    /* A copy that is captured has not begun. */
    if (stream && !fake_capturing && !__atomic_exchange_n(&stream->behind, 1, __ATOMIC_SEQ_CST))
        __atomic_add_fetch(&behind, 1, __ATOMIC_SEQ_CST);
    return 0;
}
COPY(cuMemcpyDtoH_v2)
COPY(cuMemcpyDtoHAsync_v2)
COPY(cuMemcpyDtoD_v2)
COPY(cuMemcpyDtoDAsync_v2)
/* Counted and failed as the function of its direction. */
int cuMemcpyAsync(address to, address from, size_t bytes, struct stream *stream) {
    if (on_device(to) && !on_device(from))
        return cuMemcpyHtoDAsync_v2(to, from, bytes, stream);
    if (!on_device(to) && on_device(from))
        return cuMemcpyDtoHAsync_v2(to, from, bytes);
    return cuMemcpyDtoDAsync_v2(to, from, bytes);
}
/* Whole pages of the device become zero without being touched: programs clear scratch that nobody reads. */
static void fill(address at, int value, size_t count) {
    address from = (at + 4095) & ~(address)4095, to = (at + count) & ~(address)4095;
    if (value || count < 1 << 16 || !on_device(at) || madvise((void *)from, to - from, MADV_DONTNEED)) {
        memset((void *)at, value, count);
        return;
    }
    memset((void *)at, 0, from - at);
    memset((void *)to, 0, at + count - to);
}
#define FILL(name, type)                                                  \
    int name(address at, type value, size_t count) {                      \
        TRY;                                                              \
        for (size_t i = 0; sizeof value > 1 && i < count; i++)            \
            ((type *)(uintptr_t)at)[i] = value;                           \
        if (sizeof value == 1)                                            \
            fill(at, (int)value, count);                                  \
        return 0;                                                         \
    }
FILL(cuMemsetD8Async, unsigned char)
FILL(cuMemsetD8_v2, unsigned char)
FILL(cuMemsetD32Async, unsigned)
FILL(cuMemsetD32_v2, unsigned)

int cuDevicePrimaryCtxRetain(void **context, int device) {
    TRY;
    fake_write_down("device", "is", (unsigned long long)device);
    *context = malloc(8);
    return 0;
}
MAKE(cuCtxGetCurrent)
OK(cuDevicePrimaryCtxRelease_v2)
HOST(cuCtxSetCurrent)
OK(cuMemHostRegister_v2)
OK(cuMemHostUnregister)
GIVE(cuStreamCreateWithPriority, struct stream *, fake_new_stream())
static void caught_up(struct stream *stream) {
    if (__atomic_exchange_n(&stream->behind, 0, __ATOMIC_SEQ_CST))
        __atomic_sub_fetch(&behind, 1, __ATOMIC_SEQ_CST);
}
int cuStreamDestroy_v2(struct stream *stream) {
    TRY;
    caught_up(stream);
    fake_end_stream(stream);
    return 0;
}
/* Waits for a stream, or for all. */
static void settle(struct stream *stream) {
    while (!fake_stuck && !lost && !fake_idle(stream))
        usleep(100);
}
int cuStreamSynchronize(struct stream *stream) {
    TRY;
    settle(stream);
    if (stream)
        caught_up(stream);
    return 0;
}
int cuCtxSynchronize(void) {
    TRY;
    settle(NULL);
    return 0;
}
int cuStreamWaitEvent(struct stream *stream, struct event *event) {
    TRY;
    /* Copies of the other stream come before what this one has next. */
    struct stream *other = event->stream;
    if (!fake_capturing && other && other != stream && __atomic_exchange_n(&other->behind, 0, __ATOMIC_SEQ_CST)
        && __atomic_exchange_n(&stream->behind, 1, __ATOMIC_SEQ_CST))
        __atomic_sub_fetch(&behind, 1, __ATOMIC_SEQ_CST);
    fake_queue((struct entry){.kind = WAIT, .stream = stream, .event = event});
    return 0;
}
GIVE(cuEventCreate, void *, calloc(1, sizeof(struct event)))
/* What is queued may still name it. */
OK(cuEventDestroy_v2)
int cuEventRecord(struct event *event, struct stream *stream) {
    TRY;
    fake_queue((struct entry){.kind = RECORD, .stream = stream, .event = event});
    return 0;
}
int cuEventSynchronize(struct event *event) {
    TRY;
    while (!fake_stuck && !lost && !fake_came(event))
        usleep(100);
    return 0;
}
int cuEventQuery(struct event *event) {
    TRY;
    if (fake_stuck || !fake_came(event))
        return 600;
    if (event->stream)
        caught_up(event->stream);
    return 0;
}
GIVE(cuEventElapsedTime, float, 1)
GIVE(cuEventElapsedTime_v2, float, 1)

MAKE(cuModuleLoadData)
MAKE(cuModuleLoadDataEx)
OK(cuModuleUnload)
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    TRY;
    *function = strdup(name);
    return 0;
}
OK(cuFuncSetAttribute)
/* Finds the first number that is not finite as the kernels not_finite_2, 4 and 8 do: their bytes, how many, mask, bad bits, allowed bits,
 * where the index goes. */
static void find_not_finite(void **args, size_t width) {
    const unsigned char *x = *(unsigned char **)args[0];
    size_t n = *(size_t *)args[1], whole = width == 8 ? ~(size_t)0 : ((size_t)1 << 8 * width) - 1;
    size_t mask = *(size_t *)args[2] & whole, bad = *(size_t *)args[3] & whole, allowed = *(size_t *)args[4] & whole;
    for (size_t i = 0, bits = 0; i < n; i++) {
        memcpy(&bits, x + i * width, width);
        if ((bits & mask) == bad && bits != allowed) {
            **(size_t **)args[5] = i;
            return;
        }
    }
}
int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, struct stream *stream, void **args, void **extra) {
    (void)x, (void)y, (void)z, (void)a, (void)b, (void)c, (void)shared, (void)extra;
    TRY;
    /* Those that tell the host how far the device has come. */
    if (!strcmp(function, "reached"))
        fake_queue((struct entry){.kind = REACHED, .stream = stream, .at = *(volatile void **)args[0], .mark = *(uint32_t *)args[1]});
    if (!strcmp(function, "passed"))
        fake_queue((struct entry){.kind = PASSED, .stream = stream, .at = *(volatile void **)args[0], .mark = *(uint64_t *)args[1]});
    if (!strcmp(function, "copy_words"))
        return cuMemcpyAsync(*(address *)args[0], *(address *)args[1], 4 * (size_t) * (int *)args[2], stream);
    if (!strncmp(function, "not_finite_", 11))
        find_not_finite(args, (size_t)atoi(function + 11));
    return 0;
}
OK(cuLaunchKernelEx)
OK(cuLaunchHostFunc)
OK(cuTensorMapEncodeTiled)
GIVE(cuFuncGetAttribute, int, 1)
GIVE(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 1)

static struct graph *captured;

int cuStreamBeginCapture_v2() {
    TRY;
    captured = fake_begin_graph();
    fake_capturing = 1;
    return 0;
}
int cuStreamEndCapture(intptr_t stream, void **graph) {
    int status = fake_called(__func__);
    (void)stream;
    fake_capturing = 0;
    *graph = status ? NULL : captured;
    return status;
}
int cuGraphInstantiateWithFlags(void **exec, void *graph) {
    TRY;
    *exec = graph;
    return 0;
}
OK(cuGraphUpload)
int cuGraphLaunch(struct graph *graph, struct stream *stream) {
    TRY;
    if (__atomic_load_n(&behind, __ATOMIC_SEQ_CST) > __atomic_load_n(&stream->behind, __ATOMIC_SEQ_CST))
        return 999;
    fake_replay(graph, stream);
    return 0;
}
OK(cuGraphDestroy)
int cuGraphExecDestroy(struct graph *graph) {
    fake_end_graph(graph);
    return fake_called(__func__);
}

static const struct {
    int status;
    const char *name, *text;
} errors[] = {
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
int cuGetErrorName(int status, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status)
            return *text = errors[i].name, 0;
    return *text = NULL, 1;
}
int cuGetErrorString(int status, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status)
            return *text = errors[i].text, 0;
    return *text = NULL, 1;
}

/* ---- the compiler: its machine code is none ---- */

static const char code[64] = "\x7f" "ELF of a fake";

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return fake_called(__func__);
}
MAKE(nvrtcCreateProgram)
OK(nvrtcCompileProgram)
GIVE_2(nvrtcGetCUBINSize, size_t, sizeof code)
int nvrtcGetCUBIN(void *program, char *to) {
    (void)program;
    memcpy(to, code, sizeof code);
    return fake_called(__func__);
}
GIVE_2(nvrtcGetProgramLogSize, size_t, 1)
GIVE_2(nvrtcGetProgramLog, char, 0)
OK(nvrtcDestroyProgram)
const char *nvrtcGetErrorString(int status) {
    (void)status;
    return "NVRTC_ERROR_COMPILATION";
}

/* ---- matmuls: two proposals for each, so that they are timed ---- */

struct proposal {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

size_t cublasLtGetVersion(void) { return 130100; }
MAKE(cublasLtCreate)
OK(cublasLtDestroy)
MAKE(cublasLtMatmulDescCreate)
OK(cublasLtMatmulDescSetAttribute)
OK(cublasLtMatmulDescGetAttribute)
OK(cublasLtMatmulDescDestroy)
MAKE(cublasLtMatrixLayoutCreate)
OK(cublasLtMatrixLayoutSetAttribute)
OK(cublasLtMatrixLayoutDestroy)
MAKE(cublasLtMatmulPreferenceCreate)
OK(cublasLtMatmulPreferenceSetAttribute)
OK(cublasLtMatmulPreferenceDestroy)
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                   int most, struct proposal *found, int *count) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    TRY;
    *count = most < 2 ? most : 2;
    memset(found, 0, sizeof *found * (size_t)*count);
    return 0;
}
int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d, void *algorithm,
                            struct proposal *found) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    TRY;
    memset(found, 0, sizeof *found);
    return 0;
}
OK(cublasLtMatmulAlgoCapGetAttribute)
OK(cublasLtMatmulAlgoConfigGetAttribute)
OK(cublasLtMatmulAlgoConfigSetAttribute)
OK(cublasLtMatmul)

/* ---- attention ---- */

size_t cudnnGetVersion(void) { return fake_number("FAKE_CUDNN_VERSION", 91400); }
const char *cudnnGetErrorString(int status) {
    (void)status;
    return "CUDNN_STATUS_EXECUTION_FAILED";
}
MAKE(cudnnCreate)
OK(cudnnDestroy)
OK(cudnnSetStream)
GIVE_2(cudnnBackendCreateDescriptor, void *, malloc(8))
OK(cudnnBackendDestroyDescriptor)
OK(cudnnBackendFinalize)
OK(cudnnBackendSetAttribute)
int cudnnBackendGetAttribute(void *descriptor, int attribute, int kind, int64_t most, int64_t *count, void *to) {
    (void)descriptor, (void)attribute;
    TRY;
    *count = 1;
    if (to && most > 0 && kind == 3) /* a number: the bytes of a plan's scratch */
        *(int64_t *)to = 0;
    if (to && most > 0 && kind == 24) /* a plan as text */
        *(char *)to = 'p';
    return 0;
}
OK(cudnnBackendExecute)

/* ---- telemetry ---- */

OK(nvmlInit_v2)
OK(nvmlShutdown)
GIVE_2(nvmlDeviceGetHandleByPciBusId_v2, void *, malloc(8))
GIVE_2(nvmlDeviceGetHandleByIndex_v2, void *, malloc(8))
GIVE_2(nvmlDeviceGetPowerUsage, unsigned, 500000)
GIVE_2(nvmlDeviceGetEnforcedPowerLimit, unsigned, 700000)
GIVE_2(nvmlDeviceGetPowerManagementLimit, unsigned, 700000)
/* Every device takes 500 W since it was first asked. */
static unsigned long long millijoules(void) {
    static struct timespec first;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!first.tv_sec)
        first = now;
    return 500.0 * ((now.tv_sec - first.tv_sec) * 1e3 + (now.tv_nsec - first.tv_nsec) * 1e-6);
}
GIVE_2(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, 7000000 + millijoules())
GIVE_2(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 0)
GIVE_2(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0)
GIVE_3(nvmlDeviceGetTemperature, unsigned, 50)
GIVE_3(nvmlDeviceGetClockInfo, unsigned, 1800)
GIVE_3(nvmlDeviceGetMaxClockInfo, unsigned, 1980)
int nvmlDeviceGetMemoryInfo(void *device, uint64_t memory[3]) {
    (void)device;
    TRY;
    memory[0] = memory[1] = fake_number("FAKE_CUDA_MEMORY", 1u << 30);
    memory[2] = 0;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {
    (void)device;
    TRY;
    rates[0] = rates[1] = 0;
    return 0;
}
const char *nvmlErrorString(int status) {
    (void)status;
    return "Unknown Error";
}
