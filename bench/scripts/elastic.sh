#!/usr/bin/env bash
# Kills random ranks at random moments of elastic runs of 4 to 8 processes, also while the others meet again, 200 times in all, and holds the
# losses against those of runs that nobody disturbed: bench/scripts/elastic.sh LOCKSTEP [KILLS] [SEED]
# KINDS=1: the same of runs with offload, adapters, other formats, further predictions and experts, seven of them with 42 kills. Not fp8: its bits depend on
# the micro-batches of a rank.
# Fails where a run does not end, or where a loss differs in a bit. Prints for each run how long its ranks took to go on.
source "$(dirname "$0")/killing.sh"
kills=${2:-200}
RANDOM=${3:-1}
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 4
kv_heads = 4
ffn = 96
[data]
paths = ["corpus"]
[train]
steps = 300
seq = 32
global_batch = 24
micro_batch = 1
threads = 1
device = "cpu"
reproducible = true
validate_every = 100
validation_sequences = 8
[checkpoint]
every = 100
[cluster]
snapshot_every = 5
TOML

# The lines of the run's history, by how long each took.
history() {
    python3 - "$1/events.jsonl" <<'PY'
import json, sys
worlds = [json.loads(line) for line in open(sys.argv[1]) if '"world"' in line]
lost = [w for w in worlds if w["gone"]]
seconds = sorted(w["recovery_s"] for w in worlds) or [0]
print(f"{len(worlds)} worlds, {len(lost)} after losses, {sum(w['from_memory'] for w in worlds)} from memory, "
      f"{sum(w['lost_steps'] for w in worlds)} steps done again; seconds lost each: median {seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}")
PY
}

done_kills=0 runs=0 most=25
# With less than a copy of the model, the bits are those of another layout. Keys with a dot are of the config; those of KINDS=1 take the place of the others.
layouts=("1..4 dp=4 zero=1" "1..6 dp=6 zero=3" "1..4 dp=2 pp=2" "1..8 dp=8 zero=2" "2..4 dp=2 tp=2" "2..8 dp=4 cp=2")
if [ -n "${KINDS:-}" ]; then
    most=6
    layouts=(
        "1..4 dp=4 zero=1 offload.optimizer=true"
        "1..4 dp=4 lora.rank=4"
        "1..4 dp=4 zero=1 precision.policy=\"bf16\" precision.master=\"bf16\" precision.moments=\"bf16\""
        "1..4 dp=4 precision.policy=\"bf16\" precision.moments=\"int8\""
        "1..4 dp=4 model.mtp_depth=1"
        "1..4 dp=4 model.experts=4 model.experts_per_token=2"
        "2..4 dp=4 ep=2 model.experts=4 model.experts_per_token=2"
    )
fi
while [ "$done_kills" -lt "$kills" ]; do
    read -r bounds layout <<<"${layouts[$((runs % ${#layouts[@]}))]}"
    ranks=${bounds#*..} set=()
    for key in $layout; do case $key in *.*) ;; *) key=parallel.$key ;; esac && set+=(--set "$key"); done
    # What has the bits of the run is one copy of the model; experts are spread over copies.
    one=() ranks_of_one=1
    for key in $layout; do
        case $key in
            dp=* | zero=*) ;;
            ep=*) one+=("parallel.dp=${key#*=}" "parallel.$key") ranks_of_one=2 ;;
            *.*) one+=("$key") ;;
            *) one+=("parallel.$key") ranks_of_one=2 ;;
        esac
    done
    whole="whole-${one[*]:-alone}"
    whole=${whole//[\" ]/-}
    if [ ! -d "$whole" ]; then
        of_one=()
        for key in "${one[@]}"; do of_one+=(--set "$key"); done
        if [ "$ranks_of_one" = 1 ]; then
            "$lockstep" train run.toml --quiet --run-dir "$whole" "${of_one[@]}" >/dev/null
        else
            "$lockstep" launch run.toml --quiet --run-dir "$whole" "${of_one[@]}" >/dev/null
        fi
    fi
    run=killed-$runs
    "$lockstep" launch run.toml --quiet --run-dir "$run" "${set[@]}" --elastic "$bounds" --restarts 1000 >"$run.out" 2>"$run.err" &
    launcher=$!
    here=0
    while kill -0 $launcher 2>/dev/null && [ "$done_kills" -lt "$kills" ] && [ "$here" -lt "$most" ]; do
        # A third of them follow at once: the others are about to meet again.
        case $((RANDOM % 3)) in
            0) sleep "0.$(printf %03d $((RANDOM % 400)))" ;;
            *) sleep "$((RANDOM % 3)).$(printf %03d $((RANDOM % 1000)))" ;;
        esac
        pid=$(rank_of $launcher $((RANDOM % ranks)))
        if [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null; then
            done_kills=$((done_kills + 1)) here=$((here + 1))
        fi
    done
    if ! timeout 600 tail --pid=$launcher -f /dev/null || ! wait $launcher; then
        echo "run $runs ($layout) failed:" && tail -30 "$run.err" && exit 1
    fi
    bits "$run" >"$run.bits"
    bits "$whole" >"$whole.bits"
    if ! cmp -s "$run.bits" "$whole.bits"; then
        echo "run $runs ($layout): other bits" && diff "$run.bits" "$whole.bits" | head -6 && exit 1
    fi
    echo "run $runs ($layout): $here kills, $(history "$run")"
    runs=$((runs + 1))
done
echo "$done_kills kills in $runs runs: no loss has another bit"
