// What updates share: launches for many tensors, and gradients as their sums hold them.

static __device__ __forceinline__ float to_f32(i64 x) { return fixed_to(x); }

// Four elements at once.
static __device__ __forceinline__ void load4(const float *from, float *x) {
    float4 v = *(const float4 *)from;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
static __device__ __forceinline__ void load4(const bf16 *from, float *x) {
    ushort4 v = *(const ushort4 *)from;
    x[0] = to_f32(bf16{v.x}), x[1] = to_f32(bf16{v.y}), x[2] = to_f32(bf16{v.z}), x[3] = to_f32(bf16{v.w});
}
static __device__ __forceinline__ void load4(const i64 *from, float *x) {
    for (int j = 0; j < 4; j++) x[j] = fixed_to(from[j]);
}

// Several tensors in one launch: block b belongs to the tensor whose first block is the last one not after b.
const int MOST_TENSORS = 64;

template <typename Entry, int MOST = MOST_TENSORS>
struct Many {
    int count;
    int first_block[MOST];
    Entry entries[MOST];

    __device__ __forceinline__ int find(int block) const {
        int low = 0, high = count;
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (first_block[middle] <= block)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
};

