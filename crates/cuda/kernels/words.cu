// A few words from one place to another, either of which may be pinned memory of the host. One block of threads.
extern "C" __global__ void copy_words(u32 *to, const u32 *from, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
