// The matmuls of few rows of `skinny.cuh`, of weights in bf16 and f16.
SKINNIES(bf16, bf16, bf16, 2)
SKINNIES(f16, f16, f16, 2)
