// Embedding, rotary positions, SwiGLU, additions: each element on its own.

template <typename T>
static __device__ void embed(const u32 *tokens, const T *table, T *out, int d, int first, int entries, int wide) {
    i64 row = blockIdx.x;
    i64 token = (i64)tokens[row] - first;
    bool here = token >= 0 && token < entries;
    if (wide) {
        const int N = Pack<T>::N;
        for (int i = threadIdx.x * N; i < d; i += blockDim.x * N) {
            float x[N] = {};
            if (here) load(table + token * d + i, x);
            store(out + row * d + i, x);
        }
    } else {
        for (int i = threadIdx.x; i < d; i += blockDim.x)
            out[row * d + i] = here ? table[token * d + i] : Of<T>::f32(0.0f);
    }
}

// RoPE: rotates the first `turned` elements of each head in the first `rotated` columns of a row; the others are copied if `out` is apart. `positions`: 0 the row's
// place in its sequence, of which `span` is this rank's part, 1 from starts[sequence] on, 2 from the start of its document.
template <typename T>
static __device__ void rotate(const T *in, const float *table, const u32 *starts, T *out, int seq, Span span, int width,
                              int rotated, int e, int turned, int table_rows, float sign, int positions, int wide) {
    i64 row = blockIdx.x;
    i64 place = span.entry((int)(row % seq));
    if (positions == 1) {
        place += starts[row / seq];
        if (place > table_rows - 1) place = table_rows - 1;
    } else if (positions == 2) {
        i64 start = starts[row];
        place = start > place ? 0 : place - start;
    }
    const float *angles = table + place * turned;
    in += row * width;
    out += row * width;
    int half = turned / 2;
    if (wide) {
        const int N = Pack<T>::N;
        int per_head = half / N;
        for (int w = threadIdx.x; w < rotated / e * per_head; w += blockDim.x) {
            int head = w / per_head, i = w % per_head * N;
            float a[N], b[N], x[N], y[N];
            load(in + head * e + i, a);
            load(in + head * e + half + i, b);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float c = angles[i + j], s = angles[half + i + j] * sign;
                x[j] = a[j] * c - b[j] * s;
                y[j] = b[j] * c + a[j] * s;
            }
            store(out + head * e + i, x);
            store(out + head * e + half + i, y);
        }
        if (in != out)
            for (int i = threadIdx.x * N; i < width; i += blockDim.x * N)
                if (i >= rotated || i % e >= turned) *(Pack<T> *)(out + i) = *(const Pack<T> *)(in + i);
    } else {
        for (int w = threadIdx.x; w < rotated / e * half; w += blockDim.x) {
            int head = w / half, i = w % half;
            float c = angles[i], s = angles[half + i] * sign;
            float a = to_f32(in[head * e + i]), b = to_f32(in[head * e + half + i]);
            out[head * e + i] = Of<T>::f32(a * c - b * s);
            out[head * e + half + i] = Of<T>::f32(b * c + a * s);
        }
        if (in != out)
            for (int i = threadIdx.x; i < width; i += blockDim.x)
                if (i >= rotated || i % e >= turned) out[i] = in[i];
    }
}

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Places for the largest magnitudes of blocks, enough of them that few blocks wait for each other at one.
const int SHARES = 1024;

extern "C" __global__ void no_shares(u32 *shares) { shares[threadIdx.x] = 0; }

// Leaves the largest magnitude of a block's numbers in its place, as it is once rounded: rounding keeps the order.
template <typename T>
static __device__ __forceinline__ void leave_largest(u32 most, u32 *shares) {
    __shared__ u32 shared[32];
    most = block_max(most, shared);
    if (threadIdx.x) return;
    u32 rounded = magnitude(to_f32(Of<T>::f32(__uint_as_float(most))));
    atomicMax(shares + (blockIdx.x & (SHARES - 1)), rounded);
}

// y = silu(gate) · up of a pack.
template <typename T>
static __device__ __forceinline__ void swiglu_pack(const T *gate, const T *up, T *y, u32 &most) {
    const int N = Pack<T>::N;
    float g[N], u[N];
    load(gate, g);
    load(up, u);
#pragma unroll
    for (int j = 0; j < N; j++) {
        g[j] = g[j] * sigmoid(g[j]) * u[j];
        most = max(most, magnitude(g[j]));
    }
    store(y, g);
}

// y = silu(gate) · up. A block has a part of a row.
template <typename T>
static __device__ __forceinline__ void swiglu(const T *gate_up, T *y, int f, int wide) {
    i64 row = blockIdx.y;
    gate_up += row * 2 * f;
    y += row * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 most = 0;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i < f) swiglu_pack(gate_up + i, gate_up + f + i, y + i, most);
    } else if (i < f) {
        float g = to_f32(gate_up[i]), u = to_f32(gate_up[f + i]);
        y[i] = Of<T>::f32(g * sigmoid(g) * u);
    }
}

static __device__ __forceinline__ void swiglu_one(float g, float u, float dy, float &dg, float &du) {
    float s = sigmoid(g);
    dg = dy * u * s * (1.0f + g * (1.0f - s));
    du = dy * g * s;
}

template <typename T>
static __device__ __forceinline__ void swiglu_grad_pack(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
                                                        u32 &most) {
    const int N = Pack<T>::N;
    float g[N], u[N], d[N];
    load(gate, g);
    load(up, u);
    load(dy, d);
#pragma unroll
    for (int j = 0; j < N; j++) {
        swiglu_one(g[j], u[j], d[j], g[j], u[j]);
        most = max(most, max(magnitude(g[j]), magnitude(u[j])));
    }
    store(dgate, g);
    store(dup, u);
}

// May work in place.
template <typename T>
static __device__ __forceinline__ void swiglu_grad(const T *dy, const T *gate_up, T *out, int f, int wide) {
    i64 row = blockIdx.y;
    dy += row * f;
    gate_up += row * 2 * f;
    out += row * 2 * f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 most = 0;
    const int N = Pack<T>::N;
    if (wide) {
        i *= N;
        if (i < f) swiglu_grad_pack(dy + i, gate_up + i, gate_up + f + i, out + i, out + f + i, most);
    } else if (i < f) {
        float dg, du;
        swiglu_one(to_f32(gate_up[i]), to_f32(gate_up[f + i]), to_f32(dy[i]), dg, du);
        out[i] = Of<T>::f32(dg);
        out[f + i] = Of<T>::f32(du);
    }
}

template <typename T>
static __device__ void add(const T *a, const T *b, T *out, i64 n) {
    const int N = Pack<T>::N;
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        float x[N], y[N];
        load(a + i, x);
        load(b + i, y);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] += y[j];
        store(out + i, x);
    } else {
        for (; i < n; i++) out[i] = Of<T>::f32(to_f32(a[i]) + to_f32(b[i]));
    }
}

// y[b] = x[b, count[b] − 1].
template <typename T>
static __device__ void last_position(const T *x, const u32 *count, T *y, int seq, int d) {
    i64 b = blockIdx.x;
    i64 row = count[b];
    row = row < 1 ? 0 : row > seq ? seq - 1 : row - 1;
    for (int i = threadIdx.x; i < d; i += blockDim.x) y[b * d + i] = x[(b * seq + row) * d + i];
}

#define POINTWISE(T, NAME)                                                                                             \
    extern "C" __global__ void embedding_##NAME(const u32 *tokens, const T *table, T *out, int d, int first,           \
                                                int entries, int wide) {                                               \
        embed<T>(tokens, table, out, d, first, entries, wide);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void rope_##NAME(const T *in, const float *table, const u32 *starts, T *out, int seq,        \
                                           int first, int count, int then, int width, int rotated, int e,              \
                                           int turned, int table_rows, float sign, int positions, int wide) {          \
        let_next_begin();                                                                                              \
        wait_for_those_before();                                                                                       \
        rotate<T>(in, table, starts, out, seq, {first, count, then}, width, rotated, e, turned, table_rows, sign,      \
                  positions, wide);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void swiglu_##NAME(const T *gate_up, T *y, int f, int wide) {                                \
        let_next_begin();                                                                                              \
        wait_for_those_before();                                                                                       \
        swiglu<T>(gate_up, y, f, wide);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void swiglu_grad_##NAME(const T *dy, const T *gate_up, T *out, int f, int wide) {            \
        swiglu_grad<T>(dy, gate_up, out, f, wide);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void add_##NAME(const T *a, const T *b, T *out, i64 n) { add<T>(a, b, out, n); }             \
    extern "C" __global__ void last_position_##NAME(const T *x, const u32 *count, T *y, int seq, int d) {              \
        last_position<T>(x, count, y, seq, d);                                                                         \
    }
POINTWISE(float, f32)
POINTWISE(bf16, bf16)
POINTWISE(f16, f16)

// The same with the largest magnitude of what is made. A block has four times as many packs as threads, of any rows. What is quantised is bf16.
const int PACKS = 4;

extern "C" __global__ void __launch_bounds__(256)
    swiglu_amax_bf16(const bf16 *gate_up, bf16 *y, int f, i64 packs, u32 *shares) {
    const int N = Pack<bf16>::N;
    i64 first = (i64)blockIdx.x * PACKS * blockDim.x + threadIdx.x;
    u32 most = 0, in_row = f / N;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        i64 pack = first + k * blockDim.x;
        if (pack >= packs) break;
        i64 row = pack / in_row, at = (pack - row * in_row) * N;
        const bf16 *gate = gate_up + row * 2 * f + at;
        swiglu_pack(gate, gate + f, y + row * f + at, most);
    }
    leave_largest<bf16>(most, shares);
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_grad_amax_bf16(const bf16 *dy, const bf16 *gate_up, bf16 *out, int f, i64 packs, u32 *shares) {
    const int N = Pack<bf16>::N;
    i64 first = (i64)blockIdx.x * PACKS * blockDim.x + threadIdx.x;
    u32 most = 0, in_row = f / N;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        i64 pack = first + k * blockDim.x;
        if (pack >= packs) break;
        i64 row = pack / in_row, at = (pack - row * in_row) * N, to = row * 2 * f + at;
        swiglu_grad_pack(dy + row * f + at, gate_up + to, gate_up + to + f, out + to, out + to + f, most);
    }
    leave_largest<bf16>(most, shares);
}
