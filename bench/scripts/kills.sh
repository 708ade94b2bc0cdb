#!/usr/bin/env bash
# Kills random ranks at random moments of four-process runs that restart by themselves, 60 times in all, and holds the losses against
# those of runs that nobody disturbed: bench/scripts/kills.sh LOCKSTEP [KILLS] [SEED]
# PRECISION=fp8 does so in fp8. Fails where a loss differs in a bit, where a kill was not reported with its rank, or where a checkpoint was damaged.
source "$(dirname "$0")/killing.sh"
kills=${2:-60}
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
steps = 60
seq = 32
global_batch = 4
micro_batch = 1
threads = 1
validate_every = 20
validation_sequences = 8
[checkpoint]
every = 1
TOML
if [ -n "${PRECISION:-}" ]; then
    printf '[precision]\npolicy = "%s"\n' "$PRECISION" >>run.toml
    if [ "$PRECISION" = fp8 ]; then echo "fp8_weights = 0" >>run.toml; fi
fi

done_kills=0 reported=0 runs=0 by_rank=(0 0 0 0)
begin=$(date +%s)
layouts=("dp=4 zero=3" "dp=2 pp=2" "dp=2 tp=2")
while [ "$done_kills" -lt "$kills" ]; do
    layout=${layouts[$((runs % ${#layouts[@]}))]}
    set=()
    for key in $layout; do set+=(--set "parallel.$key"); done
    [ -d "whole-${layout// /-}" ] || "$lockstep" train run.toml --quiet --run-dir "whole-${layout// /-}" "${set[@]}" >/dev/null
    run=killed-$runs
    : >"$run.kills"
    "$lockstep" launch run.toml --quiet --run-dir "$run" "${set[@]}" --restarts 1000 >"$run.out" 2>"$run.err" &
    launcher=$!
    here=0
    while kill -0 $launcher 2>/dev/null && [ "$done_kills" -lt "$kills" ] && [ "$here" -lt 20 ]; do
        # From while processes still look for each other to while they save.
        sleep "$((RANDOM % 2)).$(printf %03d $((RANDOM % 1000)))"
        rank=$((RANDOM % 4))
        pid=$(rank_of $launcher $rank)
        if [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null; then
            done_kills=$((done_kills + 1)) here=$((here + 1)) by_rank[rank]=$((by_rank[rank] + 1))
            echo "$pid $rank" >>"$run.kills"
            # One failure at a time: the next comes when the launcher has told of this one.
            for _ in $(seq 200); do
                grep -q "(process $pid)" "$run.err" && break
                kill -0 $launcher 2>/dev/null || break
                sleep 0.05
            done
        fi
    done
    wait $launcher || { echo "FAILED: $layout ended with exit code $?"; cat "$run.err"; exit 1; }
    diff <(bits "whole-${layout// /-}") <(bits "$run") || { echo "FAILED: $layout has other bits"; exit 1; }
    if grep -q "damaged" "$run.err"; then echo "FAILED: a damaged checkpoint"; cat "$run.err"; exit 1; fi
    while read -r pid rank; do
        grep -q "^error: rank $rank (process $pid) was killed by signal 9" "$run.err" || { echo "FAILED: kill of rank $rank not reported"; cat "$run.err"; exit 1; }
        reported=$((reported + 1))
    done <"$run.kills"
    runs=$((runs + 1))
    echo "$layout: $here kills, 60 steps, the bits of the run that nobody disturbed"
done
echo "$done_kills kills in $runs runs of 4 processes (ranks 0 to 3: ${by_rank[*]}), $reported reported with their rank; every loss, gradient norm and validation loss the same bit for bit; $(($(date +%s) - begin)) s"
