#!/usr/bin/env bash
# Latent attention (MLA) beside PyTorch: a step of a 1.3B decoder with heads of 192 and 128, in turn, and what documents and `deterministic` cost.
# usage: bench/scripts/latent.sh LOCKSTEP [BATCH] > bench/records/latent.txt
# PyTorch is what `python3` has. Its line is the fastest of three ways through scaled_dot_product_attention: cuDNN with heads of 192 and 128, and V
# padded to 192 for cuDNN and for FlashAttention.
set -uo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/latent.sh LOCKSTEP [BATCH]}")
batch=${2:-8}
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/latent.toml" <<TOML
[model]
architecture = "llama"
vocab_size = 32000
layers = 24
dim = 2048
heads = 16
ffn = 5632
kv_lora_rank = 512
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
[data]
paths = ["unused"]
[train]
seq = 4096
global_batch = $batch
[precision]
policy = "bf16"
TOML
echo "# bench/scripts/latent.sh, batch $batch, at ${COMMIT:-$(git -C "$here" rev-parse --short HEAD 2>/dev/null)}"
ours() {
    local name=$1
    shift
    timeout 120 "$lockstep" bench train "$work/latent.toml" --device cuda --steps 6 "$@" >"$work/out" 2>&1 || tail -3 "$work/out"
    printf "%-28s %s\n" "lockstep $name" "$(grep -E "tokens/s" "$work/out" | head -1 | sed 's/^ *//')"
    grep -iE "slow|warning" "$work/out" | sed 's/^/    /' || true
}
peer() {
    local said
    said=$(timeout 240 python3 "$here/latent_peer.py" --batch "$batch" --attention "$1" 2>"$work/err" | tail -1)
    printf "%-28s %s\n" "PyTorch $1" "${said:-FAILED: $(grep -E "Error" "$work/err" | tail -1 | cut -c1-160)}"
}
ours "" 
peer cudnn
ours ""
peer cudnn-padded
ours ""
peer flash-padded
ours deterministic --set train.deterministic=true
ours documents --set data.document_mask=true
