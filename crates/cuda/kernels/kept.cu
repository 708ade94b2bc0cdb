// Updates of weights and moments that are kept in fewer bits than f32: read as f32, moved by any of the rules of optimizer.cu, and rounded.
// To bf16 by random bits of (seed, step, tensor, element); to 8 bits in blocks of 256 with a scale, as lockstep_ir::dynamic8 has them.

const int BLOCK = 256, BLOCK_BYTES = 260;

// What numbers are kept in.
enum Type { NONE, F32, BF16, F16, SIGNED8, UNSIGNED8 };
enum Rule { ADAMW, LION, SGD, MOMENTUM, DESCEND };

// A piece of a tensor: `n` elements from `from` on. In the whole tensor they stand from `whole` on, in rows of `len` that are `stride` apart.
// `copy` is rounded weights, or where the rule moves no weights the update itself.
struct Piece {
    const void *grad;
    u8 *w, *m, *v;
    void *copy;
    i64 from, n, whole;
    u32 len, stride;
    u64 site;
    float decay, lr_scale;
    // Four bits each: w, m, v, copy.
    u64 types;

    __device__ __forceinline__ int type(int of) const { return (int)(types >> (4 * of) & 15); }
};
typedef Many<Piece, 32> Pieces;

// The numbers that bytes stand for, and the borders between their magnitudes. The first of each pair is for numbers of any sign.
struct Tables {
    float values[2][256], borders[2][257];

    // Magnitude `k` of a table whose lowest decade has `cells` cells.
    static __device__ float magnitude(int k, int cells) {
        if (k == 0) return 0.0f;
        const double powers[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
        int cell = k - 1;
        for (int decade = 0; decade < 7; decade++) {
            int here = cells << decade;
            // In the host's order, and not contracted.
            if (cell < here)
                return (float)__dmul_rn(__dadd_rn(0.1, __ddiv_rn(__dmul_rn(0.9, cell + 0.5), (double)here)),
                                        powers[decade]);
            cell -= here;
        }
        return 1.0f;
    }

    // By all threads of a block of 256.
    __device__ void fill() {
        int i = threadIdx.x;
        values[0][i] = i < 127 ? -magnitude(127 - i, 1) : magnitude(i - 127, 1);
        values[1][i] = magnitude(i, 2);
        for (int k = i; k < 257; k += 256) {
            for (int t = 0; t < 2; t++) {
                bool last = k >= (t ? 255 : 128);
                double sum = (double)magnitude(k, t + 1) + (double)magnitude(k + 1, t + 1);
                borders[t][k] = last ? __uint_as_float(0x7f800000u) : (float)(sum / 2.0);
            }
        }
        __syncthreads();
    }

    // The byte of a number from -1 to 1: the nearest. A guess from its decade is at most one off.
    __device__ __forceinline__ u8 byte(float x, int t) const {
        float a = fabsf(x);
        int decade = (a >= 1e-6f) + (a >= 1e-5f) + (a >= 1e-4f) + (a >= 1e-3f) + (a >= 1e-2f) + (a >= 1e-1f);
        float power = decade == 0   ? 1e6f
                      : decade == 1 ? 1e5f
                      : decade == 2 ? 1e4f
                      : decade == 3 ? 1e3f
                      : decade == 4 ? 1e2f
                      : decade == 5 ? 1e1f
                                    : 1.0f;
        // Decades are those of cells: from a tenth of a power to the power.
        int cells = (t + 1) << decade, before = (t + 1) * ((1 << decade) - 1);
        int at = before + 1 + (int)floorf((a * power - 0.1f) * ((float)cells * (1.0f / 0.9f)));
        int most = t ? 255 : 128;
        at = at < 0 ? 0 : at > most ? most : at;
        if (a > borders[t][at])
            at++;
        else if (at > 0 && a <= borders[t][at - 1])
            at--;
        if (t) return (u8)(at == 0 && x > 0.0f ? 1 : at);
        return (u8)(x < 0.0f ? 127 - (at < 127 ? at : 127) : 127 + at);
    }
};

// Eight floats, or eight halves, at once: at a multiple of eight.
static __device__ __forceinline__ void load_words(const float *from, float x[8]) {
    float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
static __device__ __forceinline__ void load_words(const bf16 *from, float x[8]) {
    uint4 words = *(const uint4 *)from;
    u32 of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = __uint_as_float(j % 2 ? of[j / 2] & 0xffff0000u : of[j / 2] << 16);
}
static __device__ __forceinline__ void load_words(const i64 *from, float x[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = to_f32(from[j]);
}
static __device__ __forceinline__ void store_halves(void *to, const u16 x[8]) {
    *(uint4 *)to = make_uint4(x[0] | (u32)x[1] << 16, x[2] | (u32)x[3] << 16, x[4] | (u32)x[5] << 16, x[6] | (u32)x[7] << 16);
}

// Eight numbers of a lane, from `i` on, of which `n` are there.
template <typename T>
static __device__ __forceinline__ void load_plain(const T *from, i64 i, int n, float x[8]) {
    if (n == 8 && i % 8 == 0) return load_words(from + i, x);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = j < n ? to_f32(from[i + j]) : 0.0f;
}

static __device__ __forceinline__ void load8(const u8 *from, int type, i64 i, int n, const Tables &tables, float x[8]) {
    if (type >= SIGNED8) {
        const u8 *block = from + i / BLOCK * BLOCK_BYTES;
        float scale = *(const float *)block;
        const u32 *words = (const u32 *)(block + 4 + i % BLOCK);
        u32 low = words[0], high = words[1];
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = tables.values[type == UNSIGNED8][(j < 4 ? low >> (8 * j) : high >> (8 * (j - 4))) & 255] * scale;
    } else if (type == BF16) {
        load_plain((const bf16 *)from, i, n, x);
    } else if (type == F32) {
        load_plain((const float *)from, i, n, x);
    }
}

static __device__ __forceinline__ u16 round_by(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return Of<bf16>::f32(x).bits;
    return (u16)((bits + (random & 0xffffu)) >> 16);
}

static __device__ __forceinline__ void store_floats(float *to, i64 i, int n, const float x[8]) {
    if (n == 8 && i % 8 == 0) {
        ((float4 *)(to + i))[0] = make_float4(x[0], x[1], x[2], x[3]);
        ((float4 *)(to + i))[1] = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < n) to[i + j] = x[j];
    }
}

static __device__ __forceinline__ void store_bits(u16 *to, i64 i, int n, const u16 x[8]) {
    if (n == 8 && i % 8 == 0) return store_halves(to + i, x);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < n) to[i + j] = x[j];
    }
}

static __device__ __forceinline__ void store8(u8 *to, int type, i64 i, int n, const Tables &tables, const float x[8],
                                              const u32 random[8]) {
    if (type >= SIGNED8) {
        // Of magnitudes as bits NaN is the largest.
        u32 most = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 bits = __float_as_uint(x[j]) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            u32 other = __shfl_xor_sync(~0u, most, step);
            most = other > most ? other : most;
        }
        float scale = __uint_as_float(most);
        u8 *block = to + i / BLOCK * BLOCK_BYTES;
        u32 words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++)
            words[j / 4] |= (u32)tables.byte(scale > 0.0f ? x[j] / scale : 0.0f, type == UNSIGNED8) << (8 * (j % 4));
        if (i % BLOCK == 0) *(float *)block = scale;
        ((u32 *)(block + 4 + i % BLOCK))[0] = words[0];
        ((u32 *)(block + 4 + i % BLOCK))[1] = words[1];
    } else if (type == BF16) {
        u16 bits[8];
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = round_by(x[j], random[j]);
        store_bits((u16 *)to, i, n, bits);
    } else if (type == F32) {
        store_floats((float *)to, i, n, x);
    }
}

// Eight warps, each with sixteen blocks of 256 elements, eight of a lane: enough to make up for the tables. Where the factor is NaN nothing
// moves, and an update is 0; the rounded copy is written all the same, as a step may have used its memory.
const int BLOCKS_PER_WARP = 16;

template <typename G>
static __device__ void update(const Pieces &pieces, const float *scalars, const float *stats, const u32 *key, int rule,
                              float a, float b, float eps) {
    __shared__ Tables tables;
    int piece = pieces.find(blockIdx.x);
    const Piece &t = pieces.entries[piece];
    int types[3] = {t.type(0), t.type(1), t.type(2)};
    if (types[1] >= SIGNED8 || types[2] >= SIGNED8) tables.fill();
    bool draws = types[0] == BF16 || types[1] == BF16 || types[2] == BF16;
    float factor = stats[1];
    bool still = factor != factor;
    if (still && t.type(3) == NONE) return;
    float lr = rule == MOMENTUM ? 0.0f : scalars[0] * t.lr_scale, keep = 1.0f - lr * t.decay;
    float rate = rule == ADAMW ? lr / scalars[3] : lr, root = rule == ADAMW ? 1.0f / sqrtf(scalars[4]) : 1.0f;
    u64 stream = hash_bits((u64)key[0] | (u64)key[1] << 32, t.site);
    i64 warp = (i64)(blockIdx.x - pieces.first_block[piece]) * 8 + threadIdx.x / 32;
    for (int k = 0; k < BLOCKS_PER_WARP; k++) {
        i64 first = (warp * BLOCKS_PER_WARP + k) * BLOCK;
        if (first >= t.n) return;
        i64 offset = first + threadIdx.x % 32 * 8, i = t.from + offset;
        int n = t.n - offset < 8 ? (int)(t.n - offset) : 8;
        float g[8], W[8], M[8], V[8], out[8];
        load_plain((const G *)t.grad, i, n, g);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            g[j] *= rule == DESCEND ? 1.0f : factor;
            W[j] = M[j] = V[j] = out[j] = 0.0f;
        }
        if (!still) {
            load8(t.w, types[0], i, n, tables, W);
            load8(t.m, types[1], i, n, tables, M);
            load8(t.v, types[2], i, n, tables, V);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (rule == ADAMW) {
                    M[j] = a * M[j] + (1.0f - a) * g[j];
                    V[j] = b * V[j] + (1.0f - b) * g[j] * g[j];
                    W[j] = W[j] * keep - rate * M[j] / (sqrtf(V[j]) * root + eps);
                } else if (rule == LION) {
                    float mixed = a * M[j] + (1.0f - a) * g[j];
                    M[j] = b * M[j] + (1.0f - b) * g[j];
                    W[j] = W[j] * keep - lr * (mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f);
                } else if (rule == SGD) {
                    M[j] = a * M[j] + g[j];
                    W[j] = W[j] * keep - lr * M[j];
                } else if (rule == MOMENTUM) {
                    M[j] = a * M[j] + (1.0f - a) * g[j];
                } else {
                    W[j] = W[j] - lr * (t.decay * W[j] + g[j]);
                }
                out[j] = rule == MOMENTUM ? a * M[j] + (1.0f - a) * g[j] : W[j];
            }
            u32 random[3][8] = {};
            if (draws) {
                // Where the elements stand in the whole tensor. Division of 64 bits takes as long as the update.
                i64 row = offset >> 32 ? offset / t.len : (u32)offset / t.len;
                u32 column = (u32)(offset - row * t.len);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    u32 bits = row_bits(stream, (u32)(t.whole + row * t.stride + column));
                    random[0][j] = bits & 0xffffu, random[1][j] = bits >> 16;
                    random[2][j] = mix_small(bits ^ 0x9e3779b9u) >> 16;
                    if (++column == t.len) column = 0, row++;
                }
            }
            store8(t.w, types[0], i, n, tables, W, random[0]);
            store8(t.m, types[1], i, n, tables, M, random[1]);
            store8(t.v, types[2], i, n, tables, V, random[2]);
        } else if (rule != MOMENTUM) {
            load8(t.w, types[0], i, n, tables, out);
        }
        int copy = t.type(3);
        if (copy == F32) {
            store_floats((float *)t.copy, i, n, out);
        } else if (copy != NONE) {
            u16 bits[8];
#pragma unroll
            for (int j = 0; j < 8; j++) bits[j] = copy == BF16 ? Of<bf16>::f32(out[j]).bits : Of<f16>::f32(out[j]).bits;
            store_bits((u16 *)t.copy, i, n, bits);
        }
    }
}

#define UPDATE(G, NAME)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) update_kept_##NAME(                                              \
        const __grid_constant__ Pieces pieces, const float *scalars, const float *stats,             \
        const u32 *key, int rule, float a, float b, float eps) {                                                       \
        update<G>(pieces, scalars, stats, key, rule, a, b, eps);                                                       \
    }
UPDATE(float, f32)
UPDATE(bf16, bf16)
UPDATE(i64, fixed)
