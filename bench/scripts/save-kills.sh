#!/usr/bin/env bash
# Kills runs while they write checkpoints in the background, half of the kills on one process and half on random ranks of four, and
# holds what comes of them against runs that nobody disturbed: bench/scripts/save-kills.sh LOCKSTEP [KILLS] [SEED]
# Fails where a loss differs in a bit, or where a checkpoint that has its name was damaged.
source "$(dirname "$0")/killing.sh"
kills=${2:-200}
RANDOM=${3:-1}
# A state of 19 MB: a save takes many steps, so that one is nearly always under way.
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 256
heads = 4
ffn = 512
[data]
paths = ["corpus"]
[train]
steps = 400
seq = 16
global_batch = 4
micro_batch = 1
threads = 1
validate_every = 0
validation_sequences = 8
[checkpoint]
every = 3
TOML

# Waits for a checkpoint of a run to be under way, a moment longer, and says whether one still is.
until_saving() {
    for _ in $(seq 3000); do
        compgen -G "$1/checkpoints/.tmp-*" >/dev/null && break
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.005
    done
    sleep "0.$(printf %03d $((RANDOM % 40)))"
    compgen -G "$1/checkpoints/.tmp-*" >/dev/null
}
finish() {
    diff <(bits "$1") <(bits "$2") || { echo "FAILED: $2 has other bits"; exit 1; }
    if grep -q "damaged" "$2.err"; then echo "FAILED: a damaged checkpoint"; cat "$2.err"; exit 1; fi
}

begin=$(date +%s)
"$lockstep" train run.toml --quiet --run-dir whole >/dev/null
done_kills=0 saving=0 runs=0
while [ "$done_kills" -lt $((kills / 2)) ]; do
    run=one-$runs here=0
    for attempt in $(seq 1000); do
        "$lockstep" train run.toml --quiet --run-dir "$run" >/dev/null 2>>"$run.err" &
        pid=$!
        if [ "$done_kills" -lt $((kills / 2)) ] && [ "$here" -lt 50 ]; then
            under_way=0
            until_saving "$run" $pid && under_way=1
            if kill -9 $pid 2>/dev/null; then done_kills=$((done_kills + 1)) here=$((here + 1)) saving=$((saving + under_way)); fi
        fi
        wait $pid 2>/dev/null && break
    done
    finish whole "$run"
    runs=$((runs + 1))
    echo "one process: $here kills, 400 steps, the bits of the run that nobody disturbed"
done
one=$done_kills one_saving=$saving
done_kills=0 saving=0
layouts=("dp=4 zero=1" "dp=2 pp=2" "dp=2 tp=2")
while [ "$done_kills" -lt $((kills / 2)) ]; do
    layout=${layouts[$((runs % ${#layouts[@]}))]}
    set=()
    for key in $layout; do set+=(--set "parallel.$key"); done
    [ -d "whole-${layout// /-}" ] || "$lockstep" train run.toml --quiet --run-dir "whole-${layout// /-}" "${set[@]}" >/dev/null
    run=four-$runs here=0
    "$lockstep" launch run.toml --quiet --run-dir "$run" "${set[@]}" --restarts 1000 >"$run.out" 2>"$run.err" &
    launcher=$!
    while kill -0 $launcher 2>/dev/null && [ "$done_kills" -lt $((kills / 2)) ] && [ "$here" -lt 25 ]; do
        under_way=0
        until_saving "$run" $launcher && under_way=1
        pid=$(rank_of $launcher $((RANDOM % 4)))
        if [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null; then
            done_kills=$((done_kills + 1)) here=$((here + 1)) saving=$((saving + under_way))
            for _ in $(seq 400); do
                grep -q "(process $pid)" "$run.err" && break
                kill -0 $launcher 2>/dev/null || break
                sleep 0.05
            done
        fi
    done
    wait $launcher || { echo "FAILED: $layout ended with exit code $?"; cat "$run.err"; exit 1; }
    finish "whole-${layout// /-}" "$run"
    runs=$((runs + 1))
    echo "four processes, $layout: $here kills, 400 steps, the bits of the run that nobody disturbed"
done
echo "$one kills of one process ($one_saving while a checkpoint was written) and $done_kills of ranks of four ($saving while one was written): no damaged checkpoint, every loss, gradient norm and validation loss the same bit for bit; $(($(date +%s) - begin)) s"
