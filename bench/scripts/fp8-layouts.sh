#!/usr/bin/env bash
# fp8 on one GPU: layouts whose ranks share it held against one rank, and runs that are killed and go on held against runs that nobody disturbed, bit for bit.
# usage: bench/scripts/fp8-layouts.sh LOCKSTEP > bench/records/fp8-layouts.txt        # about 2 minutes
# DEVICE=cpu does the same without one.
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/fp8-layouts.sh LOCKSTEP}")
device=${DEVICE:-cuda}
export COLUMNS=120
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo "# bench/scripts/fp8-layouts.sh at ${COMMIT:-$(git -C "$root" rev-parse --short HEAD 2>/dev/null)}, $device"
cat "$root"/docs/*.md >corpus.txt
model=$'vocab_size = 256\nlayers = 4\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 256'
rest=$'[data]\npaths = ["corpus.txt"]\n[train]\nsteps = 30\nseq = 512\nglobal_batch = 4\nmicro_batch = 1\n[checkpoint]\nevery = 4\n[precision]\npolicy = "fp8"\nfp8_weights = 0'
echo "[model]
$model
$rest" >dense.toml
echo "[model]
architecture = \"mixtral\"
experts = 4
$model
$rest" >mixture.toml

# CONFIG KEY=VALUE LAYOUT...
check() {
    local config=$1 key=$2 layouts=()
    for layout in "${@:3}"; do layouts+=(--layouts "$layout"); done
    echo "## $config, $key"
    "$lockstep" verify "$config.toml" --device "$device" --set "$key" --full-size --steps 2 "${layouts[@]}" 2>log | grep -E "^  (at most |.* kept$)|BROKEN" || { cat log && exit 1; }
}
check dense precision.fp8_recipe=current dp=2,zero=3 tp=2,sp cp=2 pp=2,zb-v dp=2,tp=2
check dense precision.fp8_recipe=delayed dp=2,zero=3 tp=2,sp cp=2 pp=2,zb-v
check dense recompute.policy=full dp=2,zero=2,pp=2
check dense precision.fp8_recipe=rowwise tp=2,sp dp=2,zero=3
check dense precision.fp8_recipe=block tp=2,sp cp=2,pp=2
check mixture precision.fp8_recipe=current ep=2 dp=2,ep=2 ep=2,tp=2 ep=2,pp=2

# Losses of every step, the last of each.
losses() { "$lockstep" metrics "$1" --format csv --keys loss; }
run() { "$lockstep" train "$1.toml" --run-dir "$2" --quiet --set train.device="$device" --set train.deterministic=true --set precision.fp8_recipe="$3" >log 2>&1; }
newest() { ls "$1/checkpoints" 2>/dev/null | sort | tail -1 || true; }
echo "## killed and resumed"
for what in "dense current" "dense delayed" "dense rowwise" "dense block" "mixture current"; do
    read -r config recipe <<<"$what"
    run "$config" "whole-$config-$recipe" "$recipe" || { cat log && exit 1; }
    kills=0
    while :; do
        run "$config" "killed-$config-$recipe" "$recipe" &
        pid=$!
        # Killed a while after the first checkpoint that it wrote itself.
        before=$(newest "killed-$config-$recipe")
        for _ in $(seq 1200); do
            kill -0 $pid 2>/dev/null || break
            if [ $kills -lt 3 ] && [ "$(newest "killed-$config-$recipe")" != "$before" ]; then
                pkill -9 -P $pid 2>/dev/null || true
                kills=$((kills + 1))
                break
            fi
            sleep 0.02
        done
        if wait $pid; then break; fi
    done
    if ! cmp -s <(losses "whole-$config-$recipe") <(losses "killed-$config-$recipe"); then
        echo "$what: BROKEN: the losses differ" && exit 1
    fi
    echo "$what: $kills kills, $(losses "whole-$config-$recipe" | tail -n +2 | wc -l) losses the same in every bit"
done
