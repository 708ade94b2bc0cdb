#!/usr/bin/env bash
# Every way to split a step, held against one rank: all mixtures of HSDP, ZeRO, context, tensor, sequence and pipeline
# parallelism on 2 to 8 ranks, which are threads of this machine. Prints a line per layout; fails where one breaks its promise.
# usage: bench/layouts.sh LOCKSTEP > bench/layouts.txt
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/layouts.sh LOCKSTEP}")
every=${2:-1} # every n-th of the mixtures
export COLUMNS=120
cd "$(mktemp -d)"

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
        if [ $ranks -ge 2 ] && [ $ranks -le 8 ]; then
            mixtures+=("$(printf '%s,' "${d#*:}" "${c#*:}" "${t#*:}" "${p#*:}" | sed 's/,,*/,/g; s/^,//; s/,$//')")
        fi
    done; done; done; done
}
mix

# NAME STEP KEYS...: the config of that name on every STEP-th mixture.
check() {
    local name=$1 step=$(($2 * every)) args=()
    cat > "$name.toml"
    for ((i = 0; i < ${#mixtures[@]}; i += step)); do args+=(--layouts "${mixtures[i]}"); done
    echo "## $name: $((${#args[@]} / 2)) layouts"
    "$lockstep" verify "$name.toml" --full-size --steps 2 "${args[@]}" 2> "$name.log" || { cat "$name.log" >&2; exit 1; }
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
check llama-reproducible 4 <<< "[model]
$sizes
kv_heads = 2
$train
reproducible = true"
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
