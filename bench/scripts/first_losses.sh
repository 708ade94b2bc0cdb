#!/bin/sh
# The first losses of a run beside those of PyTorch, from the same weights on the same tokens.
#
#     bench/scripts/first_losses.sh SIZE [FOLDER]
#
# SIZE     tiny, tiny-tied, tiny-bf16, tiny-tied-bf16 (seconds on a CPU), or 1b: Llama 3.2 1B in bf16, for a GPU; 1b needs
#          13 GB in FOLDER
# FOLDER   where files go, a new one in TMPDIR if not given; removed at the end unless KEEP is set
#
# Environment: LOCKSTEP (target/release/lockstep), PYTHON (python3, with torch), DEVICE (auto), STEPS (5), SEQ, BATCH, BOUND, KEEP.
set -eu
size=${1:?usage: bench/scripts/first_losses.sh SIZE [FOLDER]}
repository=$(cd "$(dirname "$0")/../.." && pwd)
lockstep=${LOCKSTEP:-$repository/target/release/lockstep}
steps=${STEPS:-5}
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
given=${2:-}
for name in weights hf run run.toml; do
    [ ! -e "$folder/$name" ] || { echo "$folder has a $name already: name another folder, or remove it" >&2; exit 2; }
done
child=
finish() {
    [ -z "$child" ] || kill -9 "$child" 2>/dev/null || true
    [ -z "$child" ] || wait "$child" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$folder/weights" "$folder/hf" "$folder/run" "$folder/run.toml" \
        "$folder/weights.log" "$folder/run.log"
    [ -n "$given" ] || rmdir "$folder" 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT TERM HUP
# Runs a command that a signal to this script ends too.
attend() {
    "$@" &
    child=$!
    wait "$child" || { status=$?; child=; return "$status"; }
    child=
}

tied=false precision=fp32
case $size in tiny-tied*) tied=true ;; esac
case $size in *bf16 | 1b) precision=bf16 ;; esac
case $size in
tiny*)
    seq=${SEQ:-64} batch=${BATCH:-4}
    model="vocab_size = 256
layers = 2
dim = 64
heads = 4
kv_heads = 2
ffn = 160
tied_embeddings = $tied
rope_scaling = { factor = 32.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 8192 }"
    ;;
1b)
    seq=${SEQ:-1024} batch=${BATCH:-4}
    model='preset = "llama-3.2-1b"'
    ;;
*)
    echo "unknown size $size" >&2
    exit 2
    ;;
esac

half=$((batch / 2))
[ "$half" -ge 1 ] || half=1
cat >"$folder/run.toml" <<EOF
[model]
$model
[data]
paths = ["$repository/crates", "$repository/docs"]
[train]
device = "${DEVICE:-auto}"
seq = $seq
global_batch = $batch
micro_batch = $half
validation_sequences = $half
[precision]
policy = "$precision"
[optimizer]
lr = 3e-4
warmup_steps = 2
EOF
say() { echo "$(date +%H:%M:%S) $*" >&2; }

say "drawing weights"
# One step that moves nothing, by the rule with the smallest state.
attend "$lockstep" train "$folder/run.toml" --run-dir "$folder/weights" --set train.steps=1 --set optimizer.warmup_steps=0 \
    --set optimizer.name=sgd --set optimizer.lr=1e-30 --set optimizer.weight_decay=0 2>"$folder/weights.log" ||
    { cat "$folder/weights.log" >&2; exit 1; }
say "exporting them"
attend "$lockstep" checkpoint export "$folder/weights" --out "$folder/hf" 2>/dev/null
rm -rf "$folder/weights"

say "training $steps steps from them"
# Far from its last step: the checkpoint is not needed.
"$lockstep" train "$folder/run.toml" --run-dir "$folder/run" --set train.steps=1000000 --set checkpoint.every=0 \
    --set train.validate_every=0 --set train.init_from="$folder/hf" 2>"$folder/run.log" &
child=$!
until [ "$(cat "$folder/run/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$steps" ]; do
    kill -0 "$child" 2>/dev/null || { cat "$folder/run.log" >&2; exit 1; }
    sleep 0.2
done
kill -9 "$child"
wait "$child" 2>/dev/null || true
child=
rm -f "$folder/weights.log" "$folder/run.log"

say "the same in PyTorch"
attend "${PYTHON:-python3}" "$repository/bench/scripts/first_losses.py" --model "$folder/hf" --run "$folder/run" --lockstep "$lockstep" \
    --steps "$steps" ${BOUND:+--bound "$BOUND"}
say "done"
