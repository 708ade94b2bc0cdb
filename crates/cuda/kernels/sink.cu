// Attention sinks: a logit of every head in the denominator of its softmax, without a value. Shapes: o [b, s, q · v], lse [b, q, s]; sinks [q],
// or [b, s, q] where `each` says that every position has them. Grid: (positions ÷ warps, heads, batch); one warp per head of a position.

struct HeadAt {
    // Where the head is in o, where its log-sum-exp stands, and where its sink.
    i64 o, statistic, sink;
    bool is;
};

static __device__ __forceinline__ HeadAt head_at(int seq, int heads, int v, int each) {
    int s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), h = blockIdx.y;
    i64 b = blockIdx.z, at = (b * seq + s) * heads + h;
    return {at * v, (b * heads + h) * seq + s, each ? at : h, s < seq};
}

// o · σ(lse − sink), and the log-sum-exp with the sink. In place where they are the same.
template <typename T>
static __device__ void with_sinks(const T *o, const float *lse, const float *sinks, T *to, float *to_lse, int seq,
                                  int heads, int v, int each) {
    HeadAt at = head_at(seq, heads, v, each);
    if (!at.is) return;
    int lane = threadIdx.x & 31;
    float x = lse[at.statistic], sink = sinks[at.sink], top = x > sink ? x : sink;
    float weight = expf(x - top), sum = weight + expf(sink - top), share = weight / sum;
    for (int i = lane; to && i < v; i += 32) to[at.o + i] = Of<T>::f32(to_f32(o[at.o + i]) * share);
    __syncwarp();
    if (to_lse && lane == 0) to_lse[at.statistic] = top + logf(sum);
}

// −e^(sink − lse) · (do · o), in rows of a number for every head.
template <typename T>
static __device__ void sink_grad(const T *dout, const T *o, const float *lse, const float *sinks, float *to, int seq,
                                 int heads, int v, int each) {
    HeadAt at = head_at(seq, heads, v, each);
    if (!at.is) return;
    float sum = 0.0f;
    for (int i = threadIdx.x & 31; i < v; i += 32) sum += to_f32(dout[at.o + i]) * to_f32(o[at.o + i]);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) to[at.o / v] = -expf(sinks[at.sink] - lse[at.statistic]) * sum;
}

#define SINKS(T, NAME)                                                                                                 \
    extern "C" __global__ void attention_sink_##NAME(const T *o, const float *lse, const float *sinks, T *to,          \
                                                     float *to_lse, int seq, int heads, int v, int each) {             \
        with_sinks<T>(o, lse, sinks, to, to_lse, seq, heads, v, each);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void attention_sink_grad_##NAME(const T *dout, const T *o, const float *lse,                 \
                                                          const float *sinks, float *to, int seq, int heads, int v,    \
                                                          int each) {                                                  \
        sink_grad<T>(dout, o, lse, sinks, to, seq, heads, v, each);                                                    \
    }
SINKS(float, f32)
SINKS(bf16, bf16)
SINKS(f16, f16)

// The sinks of all heads at every position. Grid: numbers ÷ threads.
extern "C" __global__ void expand_sinks(const float *sinks, float *to, int heads, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = sinks[i % heads];
}
