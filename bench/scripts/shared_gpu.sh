#!/usr/bin/env bash
# Two builds on ranks that share one GPU, one after the other: median steps of layouts, and the time of whole `verify` commands.
#   bench/scripts/shared_gpu.sh BEFORE AFTER
set -euo pipefail
builds=("$1" "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -c "
for i in range(60000): print(i % 31, 'times', i % 17, 'is', (i % 31) * (i % 17))" > "$folder/text.txt"
cat > "$folder/run.toml" <<TOML
[model]
vocab_size = 8192
layers = 8
dim = 512
heads = 8
kv_heads = 4
ffn = 1536
[data]
paths = ["$folder/text.txt"]
tokenizer = "bytes"
[train]
seq = 512
global_batch = 8
micro_batch = 2
steps = 12
TOML
steps() {
    local name=$1
    shift
    for build in "${builds[@]}"; do
        rm -rf "$folder/run"
        "$build" train "$folder/run.toml" --run-dir "$folder/run" --set train.device=cuda --set train.validation_sequences=0 \
            --set model.vocab_size=256 "$@" > "$folder/log" 2>&1 || tail -3 "$folder/log"
        python3 - "$folder/run/metrics.jsonl" "$name" "$build" <<'PYTHON'
import json, sys
steps = sorted(json.loads(line)["step_s"] for line in list(open(sys.argv[1]))[3:])
print(f"{sys.argv[2]}, {sys.argv[3]}: median step {1e3 * steps[len(steps) // 2]:.1f} ms")
PYTHON
    done
}
steps "one rank"
steps "dp=2" --set parallel.dp=2
steps "dp=2 zero=3" --set parallel.dp=2 --set parallel.zero=3
steps "tp=2 sp" --set parallel.tp=2 --set parallel.sequence_parallel=true
steps "pp=2" --set parallel.pp=2
steps "dp=2 tp=2 pp=2" --set parallel.dp=2 --set parallel.tp=2 --set parallel.pp=2
checks() {
    local name=$1
    shift
    for build in "${builds[@]}"; do
        local start
        start=$(date +%s%N)
        "$build" verify "$@" --device cuda > "$folder/log" 2>&1 || tail -3 "$folder/log"
        echo "verify $name, $build: $((($(date +%s%N) - start) / 1000000)) ms"
    done
}
# What every build tries by default; later ones try more.
kinds=()
for kind in dp=2 dp=2,zero=1 dp=2,zero=2 dp=2,zero=3 dp=4,zero=3 tp=2 tp=2,sp pp=2 pp=2,gpipe pp=3 dp=2,tp=2 dp=2,zero=1,tp=2,sp \
    dp=2,zero=3,tp=2,sp dp=2,zero=1,pp=2 tp=2,sp,pp=2 dp=2,tp=2,pp=2 dp=2,zero=1,tp=2,sp,pp=2,gpipe; do
    kinds+=(--layouts "$kind")
done
# The first run of a build makes its kernels.
for build in "${builds[@]}"; do "$build" verify examples/quickstart.toml --device cuda > /dev/null 2>&1; done
checks "quick start" examples/quickstart.toml "${kinds[@]}"
checks "quick start, full size" examples/quickstart.toml --full-size "${kinds[@]}"
checks "dp=2 zero=3" "$folder/run.toml" --full-size --steps 3 --layouts dp=2,zero=3
checks "8 ranks" "$folder/run.toml" --full-size --steps 3 --layouts dp=2,zero=1,tp=2,sp,pp=2,gpipe
