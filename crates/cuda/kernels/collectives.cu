// Collectives of ranks that share the device, and what others' parts become that another device has sent. Sums are taken in the order
// of the group, as on the host.

enum Kind { ALL_REDUCE = 0, REDUCE_SCATTER = 1 };

// Of each tensor: rows, elements of a rank's part of a row, then every rank's input, then every rank's output.
struct Tensors {
    u64 words[448];
};

// What a number is added up in.
template <typename T>
struct Number {
    typedef T Sum;
    static __device__ __forceinline__ T start(T x) { return x; }
    static __device__ __forceinline__ T add(T sum, T x) { return sum + x; }
    static __device__ __forceinline__ T end(T sum) { return sum; }
};
template <>
struct Number<i64> {
    typedef i64 Sum;
    static __device__ __forceinline__ i64 start(i64 x) { return x; }
    static __device__ __forceinline__ i64 add(i64 sum, i64 x) { return fixed_merge(sum, x); }
    static __device__ __forceinline__ i64 end(i64 sum) { return sum; }
};
template <typename T>
struct Rounded {
    typedef float Sum;
    static __device__ __forceinline__ float start(T x) { return to_f32(x); }
    static __device__ __forceinline__ float add(float sum, T x) { return sum + to_f32(x); }
    static __device__ __forceinline__ T end(float sum) { return Of<T>::f32(sum); }
};
template <>
struct Number<bf16> : Rounded<bf16> {};
template <>
struct Number<f16> : Rounded<f16> {};

// Where element `i` of the whole, in rows of every rank's part, stands: on which rank, and where in its part. In zig-zag order ranks have two
// halves of a part each, an early and a late one.
struct Place {
    int rank;
    i64 at;
};
static __device__ __forceinline__ Place place_of(i64 i, i64 elements, int ranks, int zigzag) {
    if (!zigzag) {
        i64 part = i / elements;
        return {(int)(part % ranks), part / ranks * elements + i % elements};
    }
    i64 half = elements / 2, part = i / half;
    int chunk = (int)(part % (2 * ranks));
    i64 row = part / (2 * ranks);
    bool late = chunk >= ranks;
    return {late ? 2 * ranks - 1 - chunk : chunk, row * elements + (late ? half : 0) + i % half};
}

// One thread reads an element of all inputs before it writes it to any output, so that they may be the same.
template <typename T>
static __device__ __forceinline__ void add_up(const Tensors &tensors, int kind, int ranks, int zigzag) {
    const u64 *tensor = tensors.words + blockIdx.y * (2 + 2 * ranks);
    i64 rows = (i64)tensor[0], elements = (i64)tensor[1];
    const u64 *inputs = tensor + 2, *outputs = inputs + ranks;
    i64 all = kind == ALL_REDUCE ? elements : rows * ranks * elements;
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        typename Number<T>::Sum sum = Number<T>::start(((const T *)inputs[0])[i]);
        for (int r = 1; r < ranks; r++) sum = Number<T>::add(sum, ((const T *)inputs[r])[i]);
        T y = Number<T>::end(sum);
        if (kind == ALL_REDUCE) {
            for (int r = 0; r < ranks; r++) ((T *)outputs[r])[i] = y;
        } else {
            Place to = place_of(i, elements, ranks, zigzag);
            ((T *)outputs[to.rank])[to.at] = y;
        }
    }
}

// Bytes of any type. The part of an output that may be an input is written with what it holds.
template <typename T>
static __device__ __forceinline__ void gather(const Tensors &tensors, int ranks, int zigzag) {
    const u64 *tensor = tensors.words + blockIdx.y * (2 + 2 * ranks);
    i64 rows = (i64)tensor[0], elements = (i64)tensor[1];
    const u64 *inputs = tensor + 2, *outputs = inputs + ranks;
    i64 all = rows * ranks * elements, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        Place from = place_of(i, elements, ranks, zigzag);
        T x = ((const T *)inputs[from.rank])[from.at];
        for (int r = 0; r < ranks; r++) ((T *)outputs[r])[i] = x;
    }
}

#define ADD(NAME, T)                                                                                              \
    extern "C" __global__ void add_##NAME(const __grid_constant__ Tensors tensors, int kind, int ranks,           \
                                          int zigzag) {                                                           \
        add_up<T>(tensors, kind, ranks, zigzag);                                                                  \
    }
ADD(f32, float)
ADD(f64, double)
ADD(bf16, bf16)
ADD(f16, f16)
ADD(fixed64, i64)

#define GATHER(NAME, T)                                                                                           \
    extern "C" __global__ void gather_##NAME(const __grid_constant__ Tensors tensors, int ranks, int zigzag) {    \
        gather<T>(tensors, ranks, zigzag);                                                                        \
    }
GATHER(1, u8)
GATHER(2, u16)
GATHER(4, u32)
GATHER(8, u64)

// Of each tensor: elements, the first rank's part among what was sent, bytes from part to part, this rank's own part, the output.
template <typename T>
static __device__ __forceinline__ void add_sent(const Tensors &tensors, int ranks, int me) {
    const u64 *tensor = tensors.words + blockIdx.y * 5;
    i64 elements = (i64)tensor[0], step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += step) {
        typename Number<T>::Sum sum;
        for (int r = 0; r < ranks; r++) {
            T x = ((const T *)(r == me ? tensor[3] : tensor[1] + r * tensor[2]))[i];
            sum = r == 0 ? Number<T>::start(x) : Number<T>::add(sum, x);
        }
        ((T *)tensor[4])[i] = Number<T>::end(sum);
    }
}

// Of each tensor: rows, elements of a rank's part of a row, the first rank's part, bytes from part to part, the whole.
template <typename T>
static __device__ __forceinline__ void join_or_cut(const Tensors &tensors, int ranks, int zigzag, int cut) {
    const u64 *tensor = tensors.words + blockIdx.y * 5;
    i64 rows = (i64)tensor[0], elements = (i64)tensor[1];
    i64 all = rows * ranks * elements, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        Place place = place_of(i, elements, ranks, zigzag);
        T *part = (T *)(tensor[2] + place.rank * tensor[3]) + place.at, *whole = (T *)tensor[4] + i;
        if (cut) *part = *whole;
        else *whole = *part;
    }
}

#define ADD_SENT(NAME, T)                                                                                         \
    extern "C" __global__ void add_sent_##NAME(const __grid_constant__ Tensors tensors, int ranks, int me) {      \
        add_sent<T>(tensors, ranks, me);                                                                          \
    }
ADD_SENT(f32, float)
ADD_SENT(f64, double)
ADD_SENT(bf16, bf16)
ADD_SENT(f16, f16)
ADD_SENT(fixed64, i64)

#define PARTS(NAME, T)                                                                                            \
    extern "C" __global__ void parts_##NAME(const __grid_constant__ Tensors tensors, int ranks, int zigzag,       \
                                            int cut) {                                                            \
        join_or_cut<T>(tensors, ranks, zigzag, cut);                                                              \
    }
PARTS(1, u8)
PARTS(2, u16)
PARTS(4, u32)
PARTS(8, u64)

// Adds up, in nanoseconds, how long the program's stream waits for other ranks: since when, and how long in all.
static __device__ void wait_clock(u64 *clock, bool ends) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (ends)
        clock[1] += now - clock[0];
    else
        clock[0] = now;
}

extern "C" __global__ void waits(u64 *clock, u32 ends) { wait_clock(clock, ends); }

// Tells the host, in pinned memory, which instruction the stream has come to.
extern "C" __global__ void passed(volatile u64 *at, u64 mark) {
    *at = mark;
    __threadfence_system();
}

// Tells the host, in pinned memory, how far the stream has come: to an instruction of several ranks, or after it.
extern "C" __global__ void reached(volatile u32 *at, u32 number, u64 *clock) {
    if (clock)
        wait_clock(clock, number % 2 == 0);
    *at = number;
    __threadfence_system();
}
