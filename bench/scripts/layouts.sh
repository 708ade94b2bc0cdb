#!/usr/bin/env bash
# Every way to split a step, held against one rank: all mixtures of HSDP, ZeRO, context, expert, tensor, sequence and pipeline
# parallelism on 2 to 8 ranks. Prints a line per layout; fails where one breaks its promise.
# usage: bench/scripts/layouts.sh LOCKSTEP [EVERY [TRANSPORT [MOST [CASES]]]] > bench/records/layouts.txt
#   EVERY      every n-th of the mixtures (1)
#   TRANSPORT  what ranks are: threads (the default), sockets, mpi, nccl (processes that share the GPUs of this machine), or strict-nccl
#              (the library of crates/cli/tests/fake_cuda, which computes nothing and sees to it that ranks ask for what fits together)
#   MOST       the most ranks of a layout (8)
#   CASES      a pattern of the names of cases (*): "*-lora*", say
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/layouts.sh LOCKSTEP [EVERY [TRANSPORT [MOST [CASES]]]]}")
every=${2:-1}
transport=${3:-threads}
most=${4:-8}
cases=${5:-*}
export COLUMNS=120
fake=$(realpath "$(dirname "$0")/../../crates/cli/tests/fake_cuda")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

how=()
case $transport in
threads) ;;
sockets) how=(--processes) ;;
mpi) ;;
nccl) how=(--processes --device cuda --share-gpus) ;;
strict-nccl)
    how=(--processes --device cuda --set parallel.timeout=60.0)
    mkdir cuda
    cc -std=gnu11 -O1 -shared -fPIC -pthread -o fake.so "$fake"/{fake,device,nccl}.c
    for library in libcuda.so.1 libnvrtc.so.13 libcublasLt.so.13 libcudnn.so.9 libnvidia-ml.so.1 libnccl.so.2; do cp fake.so "cuda/$library"; done
    export LOCKSTEP_CUDA_LIBRARIES=$PWD/cuda LOCKSTEP_CACHE=$PWD/cache FAKE_CUDA_DEVICES=8 FAKE_NCCL_WORLD=$PWD/world
    ;;
*) echo "$transport is none of threads, sockets, mpi, nccl and strict-nccl" >&2 && exit 2 ;;
esac

data=("1:" "2:dp=2" "2:dp=2,zero=1" "2:dp=2,zero=2" "2:dp=2,zero=3" "4:dp_replicate=2,dp=2,zero=1" "4:dp_replicate=2,dp=2,zero=2"
    "4:dp_replicate=2,dp=2,zero=3")
context=("1:" "2:cp=2" "2:cp=2,context=gather" "4:cp=4")
tensor=("1:" "2:tp=2" "2:tp=2,sp")
stages=("1:" "2:pp=2" "2:pp=2,gpipe" "2:pp=2,interleaved,virtual=2" "2:pp=2,interleaved,virtual=3" "2:pp=2,zb-h1" "2:pp=2,zb-v"
    "4:pp=4" "4:pp=4,interleaved,virtual=2" "4:pp=4,zb-h1" "4:pp=4,zb-v")

# All mixtures of these.
mix() {
    mixtures=()
    local d c t p ranks
    for d in "${data[@]}"; do for c in "${context[@]}"; do for t in "${tensor[@]}"; do for p in "${stages[@]}"; do
        ranks=$((${d%%:*} * ${c%%:*} * ${t%%:*} * ${p%%:*}))
        if [ $ranks -ge 2 ] && [ $ranks -le $most ]; then
            mixtures+=("$ranks:$(printf '%s,' "${d#*:}" "${c#*:}" "${t#*:}" "${p#*:}" | sed 's/,,*/,/g; s/^,//; s/,$//')")
        fi
    done; done; done; done
}
mix

# NAME STEP KEYS...: the config of that name on every STEP-th mixture.
check() {
    local name=$1 step=$(($2 * every)) all=() sizes=(2 4 8)
    cat > "$name.toml"
    # shellcheck disable=SC2254
    case $name in $cases) ;; *) return ;; esac
    for ((i = 0; i < ${#mixtures[@]}; i += step)); do all+=("${mixtures[i]}"); done
    echo "## $name: ${#all[@]} layouts"
    # mpirun starts as many processes as layouts have ranks.
    if [ "$transport" != mpi ]; then sizes=(any); fi
    for size in "${sizes[@]}"; do
        local args=() start=()
        for mixture in "${all[@]}"; do
            if [ "$size" = any ] || [ "${mixture%%:*}" = "$size" ]; then args+=(--layouts "${mixture#*:}"); fi
        done
        if [ ${#args[@]} = 0 ]; then continue; fi
        if [ "$size" != any ]; then start=(mpirun --allow-run-as-root --oversubscribe -n "$size"); fi
        "${start[@]}" "$lockstep" verify "$name.toml" --full-size --steps 2 "${how[@]}" "${args[@]}" 2> "$name.log" || {
            cat "$name.log" >&2
            exit 1
        }
    done
    if [ -e world.errors ]; then cat world.errors >&2 && exit 1; fi
    echo
}

train=$'[train]\nseq = 32\nglobal_batch = 16\nmicro_batch = 1\nthreads = 1'
sizes=$'vocab_size = 131\nlayers = 8\ndim = 32\nheads = 4\nffn = 48'
check llama 1 <<< "[model]
$sizes
kv_heads = 2
$train"
check llama-tied-bf16 4 <<< "[model]
$sizes
kv_heads = 2
tied_embeddings = true
$train
[precision]
policy = \"bf16\""
# Sums in fixed point are the CPU's alone.
case $transport in *nccl) ;; *)
    check llama-reproducible 4 <<< "[model]
$sizes
kv_heads = 2
$train
reproducible = true"
    ;;
esac
check llama-documents-recompute 5 <<< "[model]
$sizes
kv_heads = 1
$train
[recompute]
policy = \"full\"
[data]
document_mask = true"
check gpt2-dropout 5 <<< "[model]
architecture = \"gpt2\"
$sizes
dropout = 0.2
$train"
check mistral-window 5 <<< "[model]
architecture = \"mistral\"
$sizes
kv_heads = 2
sliding_window = 9
$train"
check qwen2-muon 7 <<< "[model]
architecture = \"qwen2\"
$sizes
kv_heads = 2
$train
[optimizer]
name = \"muon\""
check qwen3 7 <<< "[model]
architecture = \"qwen3\"
$sizes
kv_heads = 2
$train"
# Latent attention, layers of two kinds, and attention sinks.
mla=$'q_lora_rank = 10\nkv_lora_rank = 12\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 8'
check latent 5 <<< "[model]
$sizes
$mla
$train"
check gemma3-pattern 7 <<< "[model]
architecture = \"gemma3_text\"
$sizes
kv_heads = 2
head_dim = 10
sliding_window = 9
layer_types = [\"sliding\", \"sliding\", \"full\"]
$train"
check sinks-pattern-bf16 7 <<< "[model]
$sizes
kv_heads = 2
attention_sinks = true
sliding_window = 9
layer_types = [\"sliding\", \"full\"]
rope_layers = [1, 0]
$train
[precision]
policy = \"bf16\""
# State and activations in the memory of the host.
check llama-offload 5 <<< "[model]
$sizes
kv_heads = 2
$train
[offload]
optimizer = true
activations = true"
# Adapters beside frozen weights, and dropout of what they read.
check llama-lora 3 <<< "[model]
$sizes
kv_heads = 2
$train
[lora]
rank = 4
dropout = 0.1"
check gpt2-lora-bf16 7 <<< "[model]
architecture = \"gpt2\"
$sizes
$train
[precision]
policy = \"bf16\"
[lora]
rank = 4
targets = [\"c_attn\", \"mlp.c_proj\"]"
# Modules that predict further tokens (MTP) after the last layer, which is on another stage than the embeddings that they share.
check llama-mtp 3 <<< "[model]
$sizes
kv_heads = 2
mtp_depth = 2
mtp_loss = 0.3
$train"
# In fp8 parts of ranks are multiples of 16.
fp8=$'[precision]\npolicy = "fp8"\nfp8_weights = 0'
bytes=$'vocab_size = 131\nlayers = 8\ndim = 64\nheads = 4\nffn = 96'
long=${train/seq = 32/seq = 128}
check llama-fp8 6 <<< "[model]
$bytes
kv_heads = 2
$long
$fp8"
check gpt2-fp8-recompute 7 <<< "[model]
architecture = \"gpt2\"
$bytes
$long
$fp8
[recompute]
policy = \"full\""

check llama-delayed 13 <<< "[model]
$bytes
kv_heads = 2
$long
$fp8
fp8_recipe = \"delayed\""
check llama-rowwise 11 <<< "[model]
$bytes
kv_heads = 2
$long
$fp8
fp8_recipe = \"rowwise\""
# Blocks of 128 are whole on two tensor-parallel ranks.
wide=$'vocab_size = 131\nlayers = 8\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 256'
check llama-block 31 <<< "[model]
$wide
${train/seq = 32/seq = 256}
$fp8
fp8_recipe = \"block\""

# By all-to-all ranks have whole heads.
context=("2:cp=2,context=a2a" "4:cp=4,context=a2a")
mix
heads=$'vocab_size = 131\nlayers = 8\ndim = 32\nheads = 8\nkv_heads = 8\nffn = 48'
check ulysses 1 <<< "[model]
$heads
$train"
check ulysses-documents-recompute 2 <<< "[model]
$heads
$train
[recompute]
policy = \"full\"
[data]
document_mask = true"
check ulysses-window-bf16 2 <<< "[model]
architecture = \"mistral\"
$heads
sliding_window = 9
$train
[precision]
policy = \"bf16\""

# The latent goes around, and ranks rebuild keys and values.
context=("2:cp=2,context=latent" "4:cp=4,context=latent")
mix
check latent-ring 2 <<< "[model]
$sizes
$mla
$train"
check latent-ring-documents-recompute 5 <<< "[model]
$sizes
$mla
$train
[recompute]
policy = \"full\"
[data]
document_mask = true"
check latent-ring-bf16 5 <<< "[model]
$sizes
$mla
sliding_window = 9
layer_types = [\"sliding\", \"full\"]
$train
[precision]
policy = \"bf16\""

# Rows of tokens go to the ranks of their experts.
data=("2:ep=2" "4:ep=4" "2:ep=2,zero=1" "2:ep=2,zero=3" "4:dp=2,ep=2" "4:dp=2,zero=2,ep=2" "4:dp=2,zero=3,ep=2" "4:dp_replicate=2,zero=3,ep=2")
context=("1:" "2:cp=2")
mix
check mixtral 1 <<< "[model]
architecture = \"mixtral\"
$sizes
kv_heads = 2
experts = 4
$train"
check mixtral-lora 3 <<< "[model]
architecture = \"mixtral\"
$sizes
kv_heads = 2
experts = 4
$train
[lora]
rank = 4"
check qwen3-moe-bound-recompute 3 <<< "[model]
architecture = \"qwen3_moe\"
$sizes
kv_heads = 2
experts = 8
experts_per_token = 3
expert_ffn = 24
$train
[parallel]
ep_bound = 3.0
[recompute]
policy = \"full\""
check mixtral-fp8 18 <<< "[model]
architecture = \"mixtral\"
$wide
experts = 4
$train
$fp8"
check deepseek-v3-mtp 5 <<< "[model]
architecture = \"deepseek_v3\"
${sizes/heads = 4/heads = 4
q_lora_rank = 10
kv_lora_rank = 12
qk_nope_head_dim = 6
qk_rope_head_dim = 4
v_head_dim = 8}
experts = 4
mtp_depth = 1
$train"
check mixtral-bf16 4 <<< "[model]
architecture = \"mixtral\"
$sizes
kv_heads = 2
experts = 4
$train
[precision]
policy = \"bf16\""
