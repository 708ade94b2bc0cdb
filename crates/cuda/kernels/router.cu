// The router of a mixture of experts: scores, the choice, its losses, and their gradients. A warp has a token, and lane i of it
// experts i, i + 32, …

const int WARPS = 4;
// As in `ops/router.rs`.
const int MOST_EXPERTS = 1024;

#define TOKEN                                                                                                          \
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;                                                              \
    i64 token = (i64)blockIdx.x * WARPS + warp;                                                                        \
    if (token >= tokens) return

static __device__ __forceinline__ float log_sum_exp(const float *logits, int experts) {
    int lane = threadIdx.x & 31;
    float most = NEGATIVE_INFINITY, sum = 0.0f;
    for (int e = lane; e < experts; e += 32) most = logits[e] > most || logits[e] != logits[e] ? logits[e] : most;
    most = warp_max(most);
    for (int e = lane; e < experts; e += 32) sum += expf(logits[e] - most);
    return most + logf(warp_sum(sum));
}

static __device__ __forceinline__ void score(const float *logits, float *scores, int experts, int sigmoid) {
    float lse = sigmoid ? 0.0f : log_sum_exp(logits, experts);
    for (int e = threadIdx.x & 31; e < experts; e += 32)
        scores[e] = sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : expf(logits[e] - lse);
    __syncwarp();
}

// The first of the largest of a warp's candidates; what is no number comes last. Without any, `at` stays negative.
struct Largest {
    float key;
    int at;
    __device__ __forceinline__ void see(float k, int i) {
        if (i < 0) return;
        bool before = k > key || (key != key && k == k);
        bool same = k == key || (k != k && key != key);
        if (at < 0 || before || (same && i < at)) {
            key = k;
            at = i;
        }
    }
    __device__ __forceinline__ void merge() {
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            float k = __shfl_xor_sync(~0u, key, step);
            int i = __shfl_xor_sync(~0u, at, step);
            see(k, i);
        }
    }
};

// weights, chosen [tokens, choices]; either may be null. `bias` counts in the choice alone, and may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route(const float *logits, const float *bias, float *weights, u32 *chosen, i64 tokens, int experts, int choices,
          int sigmoid, int normalise, float scale, int groups, int top_groups) {
    __shared__ float all_scores[WARPS][MOST_EXPERTS], all_sums[WARPS][MOST_EXPERTS / 2];
    __shared__ u8 all_open[WARPS][MOST_EXPERTS];
    TOKEN;
    float *scores = all_scores[warp], *sums = all_sums[warp];
    u8 *open = all_open[warp];
    score(logits + token * experts, scores, experts, sigmoid);
    auto key = [&](int e) { return scores[e] + (bias ? bias[e] : 0.0f); };
    for (int e = lane; e < experts; e += 32) open[e] = groups == 1;
    __syncwarp();
    if (groups > 1) {
        // Of every group the sum of its two best sigmoids, or its best softmax; then the best groups.
        int each = experts / groups;
        for (int g = 0; g < groups; g++) {
            Largest first = {0.0f, -1}, second = {0.0f, -1};
            for (int i = lane; i < each; i += 32) first.see(key(g * each + i), i);
            first.merge();
            for (int i = lane; i < each; i += 32)
                if (i != first.at) second.see(key(g * each + i), i);
            second.merge();
            if (lane == 0) sums[g] = sigmoid ? first.key + second.key : first.key;
        }
        __syncwarp();
        for (int n = 0; n < top_groups; n++) {
            Largest best = {0.0f, -1};
            for (int g = lane; g < groups; g += 32)
                if (!open[g * each]) best.see(sums[g], g);
            best.merge();
            if (best.at >= 0)
                for (int i = lane; i < each; i += 32) open[best.at * each + i] = 1;
            __syncwarp();
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < choices; i++) {
        Largest best = {0.0f, -1};
        for (int e = lane; e < experts; e += 32)
            if (open[e]) best.see(key(e), e);
        best.merge();
        int expert = best.at < 0 ? 0 : best.at;
        float own = scores[expert];
        sum += own;
        __syncwarp();
        if (lane == 0) {
            open[expert] = 0;
            if (weights) weights[token * choices + i] = own;
            if (chosen) chosen[token * choices + i] = expert;
        }
        __syncwarp();
    }
    if (!weights) return;
    float factor = normalise ? scale / sum : scale;
    for (int i = lane; i < choices; i += 32) weights[token * choices + i] *= factor;
}

// weights, chosen [tokens, choices] of given [tokens, choices], with the bits of `route`; either may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route_to(const float *logits, const u32 *given, float *weights, u32 *chosen, i64 tokens, int experts, int choices,
             int sigmoid, int normalise, float scale) {
    __shared__ float all_scores[WARPS][MOST_EXPERTS];
    TOKEN;
    float *scores = all_scores[warp], sum = 0.0f;
    score(logits + token * experts, scores, experts, sigmoid);
    given += token * choices;
    for (int i = 0; i < choices; i++) sum += scores[given[i] % experts];
    float factor = normalise ? scale / sum : scale;
    for (int i = lane; i < choices; i += 32) {
        if (weights) weights[token * choices + i] = scores[given[i] % experts] * factor;
        if (chosen) chosen[token * choices + i] = given[i];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route_grad(const float *dweights, const float *logits, const u32 *chosen, float *dlogits, i64 tokens, int experts,
               int choices, int sigmoid, int normalise, float scale) {
    __shared__ float all_scores[WARPS][MOST_EXPERTS];
    TOKEN;
    float *scores = all_scores[warp];
    score(logits + token * experts, scores, experts, sigmoid);
    dweights += token * choices;
    chosen += token * choices;
    float sum = 0.0f, mean = 0.0f, dot = 0.0f;
    for (int i = 0; i < choices; i++) {
        float s = scores[chosen[i] % experts];
        sum += s;
        mean += dweights[i] * s;
    }
    mean /= sum;
    // Of a score, by the weights.
    auto of = [&](float dw) { return scale * (normalise ? (dw - mean) / sum : dw); };
    for (int i = 0; i < choices; i++) dot += of(dweights[i]) * scores[chosen[i] % experts];
    for (int e = lane; e < experts; e += 32) {
        float by = 0.0f, s = scores[e];
        for (int i = 0; i < choices; i++)
            if ((int)(chosen[i] % experts) == e) by += of(dweights[i]);
        dlogits[token * experts + e] = sigmoid ? by * s * (1.0f - s) : s * (by - dot);
    }
}

// counts [b, experts] of chosen [b, rows]: a block has a sequence.
extern "C" __global__ void __launch_bounds__(1024) expert_counts(const u32 *chosen, float *counts, int rows, int experts) {
    __shared__ u32 found[MOST_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) found[e] = 0;
    __syncthreads();
    chosen += (i64)blockIdx.x * rows;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) atomicAdd(found + chosen[i] % experts, 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[(i64)blockIdx.x * experts + e] = (float)found[e];
}

// load [experts] += of chosen [rows]: a block has `each` of them. Sums of whole numbers are exact in any order.
extern "C" __global__ void __launch_bounds__(1024)
    expert_load(const u32 *chosen, double *load, i64 rows, i64 each, int experts) {
    __shared__ u32 found[MOST_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) found[e] = 0;
    __syncthreads();
    i64 end = min(rows, (blockIdx.x + 1) * each);
    for (i64 i = blockIdx.x * each + threadIdx.x; i < end; i += blockDim.x) atomicAdd(found + chosen[i] % experts, 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        if (found[e]) atomicAdd(load + e, (double)found[e]);
}

// next [experts]: a bias one step further against its expert's load. One block.
extern "C" __global__ void __launch_bounds__(1024)
    move_bias(const float *bias, const double *load, const float *stats, float *next, int experts, float rate) {
    double all = 0.0;
    for (int e = 0; e < experts; e++) all += load[e];
    bool applied = !isnan(stats[1]);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        double own = load[e] * experts;
        float step = own < all ? rate : own > all ? -rate : 0.0f;
        next[e] = bias[e] + (applied ? step : 0.0f);
    }
}

// Of a token: the log-sum-exp of its logits, how many rows its sequence has, and how much of its scores goes to busy experts.
static __device__ __forceinline__ void look(const float *logits, const float *counts, int experts, float &lse,
                                            float &rows, float &busy) {
    rows = busy = 0.0f;
    lse = log_sum_exp(logits, experts);
    for (int e = threadIdx.x & 31; e < experts; e += 32) rows += counts[e];
    rows = warp_sum(rows);
    for (int e = threadIdx.x & 31; e < experts; e += 32) busy += expf(logits[e] - lse) * (counts[e] / rows);
    busy = warp_sum(busy);
}

// Losses of tokens; counts are those of the token's sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    router_loss(const float *logits, const float *counts, float *losses, i64 tokens, int seq, int experts, float balance,
                float z) {
    TOKEN;
    float lse, rows, busy;
    look(logits + token * experts, counts + token / seq * experts, experts, lse, rows, busy);
    if (lane == 0) losses[token] = balance * experts * busy + z * lse * lse;
}

// `scale` may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    router_loss_grad(const float *logits, const float *counts, const float *scale, float *dlogits, i64 tokens, int seq,
                     int experts, float balance, float z) {
    TOKEN;
    logits += token * experts;
    counts += token / seq * experts;
    float lse, rows, busy, seed = scale ? *scale : 1.0f;
    look(logits, counts, experts, lse, rows, busy);
    balance *= seed * experts;
    z *= 2.0f * seed;
    for (int e = lane; e < experts; e += 32)
        dlogits[token * experts + e] = expf(logits[e] - lse) * (balance * (counts[e] / rows - busy) + z * lse);
}
