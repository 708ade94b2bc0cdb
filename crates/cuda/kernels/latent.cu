// Heads of latent attention: packed Q·K·V from queries, from what the latent expands to, and from the key that all heads share.
// A head of Q is `plain` elements and then pairs with RoPE; one of kv is `plain` elements of a key and then a value. In packed Q·K·V
// what has RoPE stands first, evens before odds. Grid: rows.

struct Sizes {
    int heads, head, rope, value;

    __device__ __forceinline__ int plain() const { return head - rope; }
    __device__ __forceinline__ int q() const { return heads * head; }
    __device__ __forceinline__ int kv() const { return heads * (plain() + value); }
    __device__ __forceinline__ int qkv() const { return 2 * q() + heads * value; }
    // Which element of the pairs stands at place i of the halves, and where an element of the pairs stands.
    __device__ __forceinline__ int pair(int i) const { return i < rope / 2 ? 2 * i : 2 * (i - rope / 2) + 1; }
    __device__ __forceinline__ int place(int i) const { return i / 2 + i % 2 * (rope / 2); }
};

// A pack of 16 bytes, times a scale where there is one. A scale of one leaves the bits as they are.
template <typename T>
static __device__ __forceinline__ Pack<T> scaled(Pack<T> p, float scale) {
    if (scale == 1.0f) return p;
    float x[Pack<T>::N];
    unpack(p, x);
#pragma unroll
    for (int i = 0; i < Pack<T>::N; i++) x[i] *= scale;
    pack(x, p);
    return p;
}

// Two packs of pairs become one of evens and one of odds, and back.
template <typename T>
static __device__ __forceinline__ void part_pairs(const T *from, T *evens, T *odds, float scale) {
    const int N = Pack<T>::N;
    float x[2 * N], even[N], odd[N];
    load(from, x), load(from + N, x + N);
#pragma unroll
    for (int i = 0; i < N; i++) even[i] = x[2 * i] * scale, odd[i] = x[2 * i + 1] * scale;
    store(evens, even), store(odds, odd);
}
template <typename T>
static __device__ __forceinline__ void join_pairs(const T *evens, const T *odds, T *to, float scale) {
    const int N = Pack<T>::N;
    float x[2 * N], even[N], odd[N];
    load(evens, even), load(odds, odd);
#pragma unroll
    for (int i = 0; i < N; i++) x[2 * i] = even[i] * scale, x[2 * i + 1] = odd[i] * scale;
    store(to, x), store(to + N, x + N);
}

// The same as `heads` and `grad` below, a pack at a time: where heads, what has RoPE of them, and values are whole packs, and RoPE whole pairs of packs.
// A unit of work is what a pack of a plain section, or two of pairs, becomes.
template <typename T>
static __device__ void heads_wide(const T *q, const T *kv, const T *shared, T *qkv, Sizes n, float scale) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    q += row * n.q(), kv += row * n.kv(), shared += row * n.rope, qkv += row * n.qkv();
    int expanded = n.plain() + n.value, half = n.rope / 2, pairs = half / N, plain = n.plain() / N, value = n.value / N;
    T *keys = qkv + n.q(), *values = keys + n.q();
    int per_head = 2 * (pairs + plain) + value;
    for (int at = threadIdx.x; at < n.heads * per_head; at += blockDim.x) {
        int h = at / per_head, i = at - h * per_head, to = h * n.head;
        if (i < pairs) {
            part_pairs(q + to + n.plain() + 2 * i * N, qkv + to + i * N, qkv + to + half + i * N, scale);
        } else if ((i -= pairs) < plain) {
            *(Pack<T> *)(qkv + to + n.rope + i * N) = scaled(*(const Pack<T> *)(q + to + i * N), scale);
        } else if ((i -= plain) < pairs) {
            part_pairs(shared + 2 * i * N, keys + to + i * N, keys + to + half + i * N, 1.0f);
        } else if ((i -= pairs) < plain) {
            *(Pack<T> *)(keys + to + n.rope + i * N) = *(const Pack<T> *)(kv + h * expanded + i * N);
        } else {
            i -= plain;
            *(Pack<T> *)(values + h * n.value + i * N) = *(const Pack<T> *)(kv + h * expanded + n.plain() + i * N);
        }
    }
}

template <typename T>
static __device__ void grad_wide(const T *dqkv, T *dq, T *dkv, Sizes n, float scale) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    dqkv += row * n.qkv();
    int expanded = n.plain() + n.value, half = n.rope / 2, pairs = half / N, plain = n.plain() / N, value = n.value / N;
    const T *keys = dqkv + n.q(), *values = keys + n.q();
    int of_q = dq ? pairs + plain : 0, per_head = of_q + (dkv ? plain + value : 0);
    for (int at = threadIdx.x; at < n.heads * per_head; at += blockDim.x) {
        int h = at / per_head, i = at - h * per_head, from = h * n.head;
        T *to_q = dq + row * n.q() + from, *to = dkv + row * n.kv() + h * expanded;
        if (i < of_q && i < pairs) {
            join_pairs(dqkv + from + i * N, dqkv + from + half + i * N, to_q + n.plain() + 2 * i * N, scale);
        } else if (i < of_q) {
            i -= pairs;
            *(Pack<T> *)(to_q + i * N) = scaled(*(const Pack<T> *)(dqkv + from + n.rope + i * N), scale);
        } else if ((i -= of_q) < plain) {
            *(Pack<T> *)(to + i * N) = *(const Pack<T> *)(keys + from + n.rope + i * N);
        } else {
            i -= plain;
            *(Pack<T> *)(to + n.plain() + i * N) = *(const Pack<T> *)(values + h * n.value + i * N);
        }
    }
}

template <typename T>
static __device__ __forceinline__ bool wide(Sizes n) {
    const int N = Pack<T>::N;
    return n.rope % (2 * N) == 0 && n.plain() % N == 0 && n.value % N == 0;
}

template <typename T>
static __device__ void heads(const T *q, const T *kv, const T *shared, T *qkv, Sizes n, float scale) {
    if (wide<T>(n)) return heads_wide<T>(q, kv, shared, qkv, n, scale);
    i64 row = blockIdx.x;
    q += row * n.q();
    kv += row * n.kv();
    shared += row * n.rope;
    qkv += row * n.qkv();
    int expanded = n.plain() + n.value;
    for (int at = threadIdx.x; at < n.q(); at += blockDim.x) {
        int h = at / n.head, i = at - h * n.head;
        int from = i < n.rope ? n.plain() + n.pair(i) : i - n.rope;
        qkv[at] = Of<T>::f32(to_f32(q[h * n.head + from]) * scale);
        qkv[n.q() + at] = i < n.rope ? shared[n.pair(i)] : kv[h * expanded + i - n.rope];
    }
    for (int at = threadIdx.x; at < n.heads * n.value; at += blockDim.x) {
        int h = at / n.value, i = at - h * n.value;
        qkv[2 * n.q() + at] = kv[h * expanded + n.plain() + i];
    }
}

// Any of the gradients may be null. That of the shared key is the sum over heads, in their order.
template <typename T>
static __device__ void grad(const T *dqkv, T *dq, T *dkv, T *dshared, Sizes n, float scale) {
    bool packs = wide<T>(n);
    if (packs && (dq || dkv)) grad_wide<T>(dqkv, dq, dkv, n, scale);
    i64 row = blockIdx.x;
    dqkv += row * n.qkv();
    int expanded = n.plain() + n.value;
    if (dq && !packs)
        for (int at = threadIdx.x; at < n.q(); at += blockDim.x) {
            int h = at / n.head, i = at - h * n.head;
            int from = i < n.plain() ? n.rope + i : n.place(i - n.plain());
            dq[row * n.q() + at] = Of<T>::f32(to_f32(dqkv[h * n.head + from]) * scale);
        }
    if (dkv && !packs)
        for (int at = threadIdx.x; at < n.kv(); at += blockDim.x) {
            int h = at / expanded, i = at - h * expanded;
            int from = i < n.plain() ? n.q() + h * n.head + n.rope + i : 2 * n.q() + h * n.value + i - n.plain();
            dkv[row * n.kv() + at] = dqkv[from];
        }
    if (dshared)
        for (int i = threadIdx.x; i < n.rope; i += blockDim.x) {
            const T *from = dqkv + n.q() + n.place(i);
            float sum = 0.0f;
            for (int h = 0; h < n.heads; h++) sum += to_f32(from[h * n.head]);
            dshared[row * n.rope + i] = Of<T>::f32(sum);
        }
}

// The shared key of a position, from pairs to halves and rotated; or back, by the opposite angles. Positions are those of `span`, and with `starts` those in documents.
template <typename T>
static __device__ void shared_key(const T *x, const float *table, const u32 *starts, T *y, int seq, Span span, int rope, int inverse) {
    i64 row = blockIdx.x, place = span.entry((int)(row % seq));
    if (starts) {
        i64 start = starts[row];
        place = start > place ? 0 : place - start;
    }
    const float *angles = table + place * rope;
    x += row * rope, y += row * rope;
    int half = rope / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float c = table ? angles[i] : 1.0f, s = table ? angles[half + i] : 0.0f;
        int first = inverse ? i : 2 * i, second = inverse ? half + i : 2 * i + 1;
        int to = inverse ? 2 * i : i, then = inverse ? 2 * i + 1 : half + i;
        float a = to_f32(x[first]), b = to_f32(x[second]);
        if (inverse) s = -s;
        y[to] = Of<T>::f32(a * c - b * s), y[then] = Of<T>::f32(b * c + a * s);
    }
}

// Packed K·V, of what a latent expands to and the shared key; `S` is what is moved at once: an element or a pack.
template <typename S>
static __device__ __forceinline__ void keys_by(const S *expanded, const S *shared, S *kv, int heads, int rope, int plain, int value) {
    int head = rope + plain, each = plain + value, per_head = head + value;
    for (int at = threadIdx.x; at < heads * per_head; at += blockDim.x) {
        int h = at / per_head, i = at - h * per_head;
        const S *from = expanded + h * each;
        S part = i < rope ? shared[i] : from[i - rope];
        if (i < head) kv[h * head + i] = part;
        else kv[heads * head + h * value + i - head] = part;
    }
}

template <typename T>
static __device__ void keys(const T *expanded, const T *shared, T *kv, int heads, int head, int rope, int value, int wide) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    int plain = head - rope;
    expanded += row * heads * (plain + value), shared += row * rope, kv += row * heads * (head + value);
    if (wide)
        keys_by((const Pack<T> *)expanded, (const Pack<T> *)shared, (Pack<T> *)kv, heads, rope / N, plain / N, value / N);
    else
        keys_by(expanded, shared, kv, heads, rope, plain, value);
}

template <typename S>
static __device__ __forceinline__ void keys_grad_by(const S *dkv, S *dexpanded, int heads, int rope, int plain, int value) {
    int head = rope + plain, each = plain + value;
    for (int at = threadIdx.x; at < heads * each; at += blockDim.x) {
        int h = at / each, i = at - h * each;
        dexpanded[at] = i < plain ? dkv[h * head + rope + i] : dkv[heads * head + h * value + i - plain];
    }
}

// Either of the gradients may be null. That of the shared key is the sum over heads, in their order.
template <typename T>
static __device__ void keys_grad(const T *dkv, T *dexpanded, T *dshared, int heads, int head, int rope, int value, int wide) {
    const int N = Pack<T>::N;
    i64 row = blockIdx.x;
    int plain = head - rope;
    dkv += row * heads * (head + value);
    if (dexpanded) {
        T *to = dexpanded + row * heads * (plain + value);
        if (wide)
            keys_grad_by((const Pack<T> *)dkv, (Pack<T> *)to, heads, rope / N, plain / N, value / N);
        else
            keys_grad_by(dkv, to, heads, rope, plain, value);
    }
    if (dshared)
        for (int i = threadIdx.x; i < rope; i += blockDim.x) {
            float sum = 0.0f;
            for (int h = 0; h < heads; h++) sum += to_f32(dkv[h * head + i]);
            dshared[row * rope + i] = Of<T>::f32(sum);
        }
}

// What generation does with the weight w [heads · block, rank] by which keys and values expand from the latent: a matmul for each head, with its own rows of w. Queries
// absorb the rows of keys: c [rows, rank] = a [rows, depth] · w [depth, rank]; sums of latents go through the rows of values: c [rows, value] = a [rows, rank] · wᵀ.
struct PerHead {
    int rows, columns, depth;
    // Elements from a row to the next, and from a head to the next.
    int a_row, a_head, w_row;
    i64 w_head;
    int c_row, c_head;
    // Whether a block of w has a row for each column of the result.
    int transposed;
    // Whether rows are whole packs.
    int wide;
};

const int ROWS = 32;
const int COLUMNS = 64;

// Tiles of both factors, that of w with a row for each column: bounds are filled with zeros.
template <typename T, int DEPTH, int PAD>
struct Tiles {
    T a[ROWS][DEPTH + PAD], w[COLUMNS][DEPTH + PAD];

    __device__ __forceinline__ void load(const T *from_a, const T *from_w, PerHead n, int row, int column, int k0) {
        const int N = Pack<T>::N;
        const T zero = Of<T>::f32(0.0f);
        Pack<T> none = {};
        if (n.wide) {
            for (int i = threadIdx.x; i < ROWS * DEPTH / N; i += blockDim.x) {
                int r = i / (DEPTH / N), k = i % (DEPTH / N) * N;
                bool there = row + r < n.rows && k0 + k < n.depth;
                *(Pack<T> *)&a[r][k] = there ? *(const Pack<T> *)(from_a + (i64)(row + r) * n.a_row + k0 + k) : none;
            }
        } else {
            for (int i = threadIdx.x; i < ROWS * DEPTH; i += blockDim.x) {
                int r = i / DEPTH, k = i % DEPTH;
                bool there = row + r < n.rows && k0 + k < n.depth;
                a[r][k] = there ? from_a[(i64)(row + r) * n.a_row + k0 + k] : zero;
            }
        }
        if (n.transposed && n.wide) {
            for (int i = threadIdx.x; i < COLUMNS * DEPTH / N; i += blockDim.x) {
                int c = i / (DEPTH / N), k = i % (DEPTH / N) * N;
                bool there = column + c < n.columns && k0 + k < n.depth;
                *(Pack<T> *)&w[c][k] = there ? *(const Pack<T> *)(from_w + (i64)(column + c) * n.w_row + k0 + k) : none;
            }
        } else {
            // Neighbouring threads read neighbours of a row of w.
            for (int i = threadIdx.x; i < COLUMNS * DEPTH; i += blockDim.x) {
                int c = n.transposed ? i / DEPTH : i % COLUMNS, k = n.transposed ? i % DEPTH : i / COLUMNS;
                bool there = column + c < n.columns && k0 + k < n.depth;
                i64 at = n.transposed ? (i64)(column + c) * n.w_row + k0 + k : (i64)(k0 + k) * n.w_row + column + c;
                w[c][k] = there ? from_w[at] : zero;
            }
        }
    }
};

// Grid: (tiles of columns, tiles of rows, heads). A warp has 16 columns of a tile, by the matrix units: lane 4g + t has rows g and g + 8 and columns 2t and 2t + 1 of each
// 16 × 8.
template <typename T>
static __device__ __forceinline__ void per_head(const T *a, const T *w, T *c, PerHead n, float scale) {
    const int DEPTH = 64;
    __shared__ alignas(16) Tiles<T, DEPTH, 8> tiles;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int column = blockIdx.x * COLUMNS, row = blockIdx.y * ROWS;
    a += (i64)blockIdx.z * n.a_head, w += blockIdx.z * n.w_head, c += (i64)blockIdx.z * n.c_head;
    float sums[2][2][4] = {};
    for (int k0 = 0; k0 < n.depth; k0 += DEPTH) {
        tiles.load(a, w, n, row, column, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 x[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[m][i] = *(const u32 *)&tiles.a[16 * m + g + 8 * (i & 1)][k + 2 * t + 8 * (i >> 1)];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const T *of = &tiles.w[16 * warp + 8 * j + g][k + 2 * t];
#pragma unroll
                for (int m = 0; m < 2; m++)
                    units<T>(sums[m][j], x[m][0], x[m][1], x[m][2], x[m][3], *(const u32 *)of, *(const u32 *)(of + 8));
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = row + 16 * m + g + 8 * (i >> 1), at = column + 16 * warp + 8 * j + 2 * t + (i & 1);
                if (r < n.rows && at < n.columns) c[(i64)r * n.c_row + at] = Of<T>::f32(sums[m][j][i] * scale);
            }
}

// In f32 a thread has 8 rows and 2 columns.
template <>
__device__ __forceinline__ void per_head<float>(const float *a, const float *w, float *c, PerHead n, float scale) {
    const int DEPTH = 32;
    __shared__ alignas(16) Tiles<float, DEPTH, 4> tiles;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = blockIdx.x * COLUMNS, row = blockIdx.y * ROWS;
    a += (i64)blockIdx.z * n.a_head, w += blockIdx.z * n.w_head, c += (i64)blockIdx.z * n.c_head;
    float sums[8][2] = {};
    for (int k0 = 0; k0 < n.depth; k0 += DEPTH) {
        tiles.load(a, w, n, row, column, k0);
        __syncthreads();
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) sums[i][j] += tiles.a[8 * warp + i][k] * tiles.w[lane + 32 * j][k];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = row + 8 * warp + i, at = column + lane + 32 * j;
            if (r < n.rows && at < n.columns) c[(i64)r * n.c_row + at] = sums[i][j] * scale;
        }
}

// What of packed Q·K·V is no matmul: the parts of queries with RoPE, the shared key, and the latent. Grid: rows.
template <typename T>
static __device__ void absorbed_rest(const T *q, const T *latent, const T *shared, T *qkv, Sizes n, int rank, float scale) {
    i64 row = blockIdx.x;
    int key = n.rope + rank;
    q += row * n.q(), latent += row * rank, shared += row * n.rope, qkv += row * (n.heads + 1) * key;
    for (int at = threadIdx.x; at < n.heads * n.rope; at += blockDim.x) {
        int h = at / n.rope, i = at - h * n.rope;
        qkv[h * key + i] = Of<T>::f32(to_f32(q[h * n.head + n.plain() + n.pair(i)]) * scale);
    }
    qkv += n.heads * key;
    for (int i = threadIdx.x; i < key; i += blockDim.x) qkv[i] = i < n.rope ? shared[n.pair(i)] : latent[i - n.rope];
}

#define LATENT(T, NAME)                                                                                                \
    extern "C" __global__ void latent_heads_##NAME(const T *q, const T *kv, const T *shared, T *qkv, int count,        \
                                                   int head, int rope, int value, float scale) {                       \
        heads<T>(q, kv, shared, qkv, {count, head, rope, value}, scale);                                               \
    }                                                                                                                  \
    extern "C" __global__ void latent_heads_grad_##NAME(const T *dqkv, T *dq, T *dkv, T *dshared, int count, int head, \
                                                        int rope, int value, float scale) {                            \
        grad<T>(dqkv, dq, dkv, dshared, {count, head, rope, value}, scale);                                            \
    }                                                                                                                  \
    extern "C" __global__ void shared_key_##NAME(const T *x, const float *table, const u32 *starts, T *y, int seq,      \
                                                 int first, int count, int then, int rope, int inverse) {              \
        shared_key<T>(x, table, starts, y, seq, {first, count, then}, rope, inverse);                                  \
    }                                                                                                                  \
    extern "C" __global__ void latent_keys_##NAME(const T *expanded, const T *shared, T *kv, int heads, int head,      \
                                                  int rope, int value, int wide) {                                     \
        keys<T>(expanded, shared, kv, heads, head, rope, value, wide);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void latent_keys_grad_##NAME(const T *dkv, T *dexpanded, T *dshared, int heads, int head,    \
                                                       int rope, int value, int wide) {                                \
        keys_grad<T>(dkv, dexpanded, dshared, heads, head, rope, value, wide);                                         \
    }                                                                                                                  \
    extern "C" __global__ void absorbed_rest_##NAME(const T *q, const T *latent, const T *shared, T *qkv, int count,   \
                                                    int head, int rope, int rank, float scale) {                       \
        absorbed_rest<T>(q, latent, shared, qkv, {count, head, rope, 0}, rank, scale);                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        per_head_##NAME(const T *a, const T *w, T *c, int rows, int columns, int depth, int a_row, int a_head,         \
                        int w_row, i64 w_head, int c_row, int c_head, int transposed, int wide, float scale) {         \
        per_head<T>(a, w, c,                                                                                           \
                    {rows, columns, depth, a_row, a_head, w_row, w_head, c_row, c_head, transposed, wide}, scale);     \
    }
LATENT(float, f32)
LATENT(bf16, bf16)
LATENT(f16, f16)
