// dQ of causal attention on tensor cores, added up in one order: the gradient that libraries add up in no order. A block has 64
// queries of a head, a warp 16 of them; keys come in tiles of BN, two of them in shared memory. Documents and windows only move
// the first key that a query sees.

static __device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

static __device__ __forceinline__ void matrices(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

static __device__ __forceinline__ void matrices_transposed(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

// c += a · b of 16×16 and 16×8.
template <typename T>
static __device__ __forceinline__ void multiply_add(float *c, const u32 *a, u32 b0, u32 b1);
#define MULTIPLY_ADD(T)                                                                                                \
    template <>                                                                                                        \
    __device__ __forceinline__ void multiply_add<T>(float *c, const u32 *a, u32 b0, u32 b1) {                          \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #T "." #T                                                \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                      \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }
MULTIPLY_ADD(bf16)
MULTIPLY_ADD(f16)

// 16 bytes into shared memory, or zeros.
static __device__ __forceinline__ void copy_later(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

struct Queries {
    int seq, heads, kv_heads, window;
    float scale;
};

template <typename T, int E, int BN>
static __device__ void dq(const T *dout, const T *qkv, const float *lse, const float *delta, const u32 *starts, T *dqkv,
                          Queries g) {
    const int STRIDE = E + 8, CHUNKS = E / 8;
    __shared__ __align__(16) T tiles[2][2][BN][STRIDE];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, h = blockIdx.y;
    // The longest rows first.
    int first_query = (gridDim.x - 1 - blockIdx.x) * 64;
    i64 b = blockIdx.z;
    int width = (g.heads + 2 * g.kv_heads) * E, kv = g.heads + h / (g.heads / g.kv_heads);
    const T *rows = qkv + b * g.seq * width;
    const T *keys = rows + kv * E, *values = keys + g.kv_heads * E;
    // Of this thread's two queries: the first key that is seen, statistics; Q and dO as operands.
    int query[2], first[2];
    float less[2], mean[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = first_query + warp * 16 + lane / 4 + 8 * r;
        bool there = s < g.seq;
        query[r] = there ? s : -1;
        s = there ? s : g.seq - 1;
        int windowed = s - g.window + 1 > 0 ? s - g.window + 1 : 0;
        u32 start = starts[b * g.seq + s];
        int given = start > (u32)s ? s : (int)start;
        first[r] = given > windowed ? given : windowed;
        i64 row = (b * g.heads + h) * g.seq + s;
        less[r] = lse[row], mean[r] = delta[row];
    }
    u32 q[E / 16][4], d[E / 16][4];
#pragma unroll
    for (int k = 0; k < E / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Rows 0, 8, 0, 8; columns 0, 0, 8, 8.
            i64 s = query[i & 1] < 0 ? g.seq - 1 : query[i & 1];
            int column = k * 16 + (i >> 1) * 8 + (lane & 3) * 2;
            q[k][i] = *reinterpret_cast<const u32 *>(rows + s * width + h * E + column);
            d[k][i] = *reinterpret_cast<const u32 *>(dout + ((b * g.seq + s) * g.heads + h) * E + column);
        }
    float sum[E / 8][4] = {};
    int last = first_query + 63 < g.seq ? first_query + 63 : g.seq - 1;
    int windowed = first_query - g.window + 1 > 0 ? first_query - g.window + 1 : 0;
    u32 start = starts[b * g.seq + first_query];
    int given = start > (u32)first_query ? first_query : (int)start;
    int from = (given > windowed ? given : windowed) / BN, to = last / BN;
    auto fetch = [&](int tile) {
        for (int i = threadIdx.x; i < 2 * BN * CHUNKS; i += 128) {
            int which = i / (BN * CHUNKS), row = i / CHUNKS % BN, chunk = i % CHUNKS, key = tile * BN + row;
            bool there = key < g.seq;
            const T *source = (which ? values : keys) + (i64)(there ? key : 0) * width + chunk * 8;
            copy_later(shared_address(&tiles[tile & 1][which][row][chunk * 8]), source, there);
        }
        asm volatile("cp.async.commit_group;");
    };
    fetch(from);
    for (int tile = from; tile <= to; tile++) {
        if (tile < to) {
            fetch(tile + 1);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        __syncthreads();
        const T(*k_tile)[STRIDE] = tiles[tile & 1][0], (*v_tile)[STRIDE] = tiles[tile & 1][1];
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            // 16 keys: scores and dP in two halves of 8.
            float s[2][4] = {}, dp[2][4] = {};
            int row = n * 16 + (lane & 7) + (lane >> 4) * 8, column = (lane >> 3 & 1) * 8;
#pragma unroll
            for (int k = 0; k < E / 16; k++) {
                u32 m[4];
                matrices(m, shared_address(&k_tile[row][k * 16 + column]));
                multiply_add<T>(s[0], q[k], m[0], m[1]);
                multiply_add<T>(s[1], q[k], m[2], m[3]);
                matrices(m, shared_address(&v_tile[row][k * 16 + column]));
                multiply_add<T>(dp[0], d[k], m[0], m[1]);
                multiply_add<T>(dp[1], d[k], m[2], m[3]);
            }
            u32 ds[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int r = i >> 1, key = tile * BN + n * 16 + half * 8 + (lane & 3) * 2 + (i & 1);
                    float p = __expf(s[half][i] * g.scale - less[r]);
                    x[i] = key >= first[r] && key <= query[r] ? p * (dp[half][i] - mean[r]) * g.scale : 0.0f;
                }
                ds[half * 2] = Of<T>::two(x[0], x[1]);
                ds[half * 2 + 1] = Of<T>::two(x[2], x[3]);
            }
            int key_row = n * 16 + (lane & 15), half = (lane >> 4) * 8;
#pragma unroll
            for (int e = 0; e < E / 16; e++) {
                u32 m[4];
                matrices_transposed(m, shared_address(&k_tile[key_row][e * 16 + half]));
                multiply_add<T>(sum[2 * e], ds, m[0], m[1]);
                multiply_add<T>(sum[2 * e + 1], ds, m[2], m[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (query[r] < 0) continue;
        T *out = dqkv + (b * g.seq + query[r]) * width + h * E + (lane & 3) * 2;
#pragma unroll
        for (int e = 0; e < E / 8; e++) *reinterpret_cast<u32 *>(out + e * 8) = Of<T>::two(sum[e][2 * r], sum[e][2 * r + 1]);
    }
}

// Grid: (positions ÷ 64, heads, batch), blocks of 128.
#define DQ(T, E, BN)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        attention_dq_##E##_##T(const T *dout, const T *qkv, const float *lse, const float *delta, const u32 *starts,   \
                               T *dqkv, int seq, int heads, int kv_heads, int window, float scale) {                   \
        Queries g = {seq, heads, kv_heads, window, scale};                                                             \
        dq<T, E, BN>(dout, qkv, lse, delta, starts, dqkv, g);                                                          \
    }
DQ(bf16, 32, 64)
DQ(bf16, 64, 64)
DQ(bf16, 96, 32)
DQ(bf16, 128, 32)
DQ(f16, 32, 64)
DQ(f16, 64, 64)
DQ(f16, 96, 32)
DQ(f16, 128, 32)
