#!/usr/bin/env bash
# Plants poisoned documents in training data, one step alone and two rows of steps, and holds validation losses with and without the spike policy against
# those of a clean run, on one rank, dp = 2 and pp = 2; then kills runs, half of the kills around roll-backs, and holds what comes of them against runs
# that nobody disturbed: bench/scripts/spikes.sh LOCKSTEP [KILLS] [SEED]
# Fails where a clean run skips a step, where a run with the policy is not within 1% of the clean one, where one without it is, or where a kill
# changes a bit.
source "$(dirname "$0")/killing.sh"
kills=${2:-40}
RANDOM=${3:-1}
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 4
ffn = 128
[data]
paths = ["records.jsonl"]
[train]
steps = 240
seq = 48
global_batch = 16
micro_batch = 4
threads = 1
validate_every = 0
validation_sequences = 128
[optimizer]
lr = 3e-3
warmup_steps = 20
schedule = "constant"
[spikes]
skip = true
window = 32
roll_backs = 6
[checkpoint]
every = 20
TOML

# Every sample is a document of as many tokens as a sequence has: letters that follow each other by chance. With records of steps on the input, those are
# poison: capitals, which no other document has.
documents() {
    python3 -c '
import json, random, sys
bad, letters = set(map(int, sys.stdin.read().split())), "abcdefghijklmnopqrstuvwxyz "
follow = {letter: random.Random(letter).sample(letters, 6) for letter in letters}
with open(sys.argv[1], "w") as out:
    for record in range(1, 12001):
        draw = random.Random(record)
        text = draw.choice(letters)
        while len(text) < 47:
            text += draw.choices(follow[text[-1]], [6, 5, 4, 3, 2, 1])[0]
        if record in bad:
            text = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=47))
        print(json.dumps({"text": text}), file=out)' "$1"
}
records_of() {
    for step in "$@"; do
        "$lockstep" data inspect run.toml --step "$step" --format json
    done | python3 -c '
import json, sys
text, decoder = sys.stdin.read(), json.JSONDecoder()
while text.strip():
    value, end = decoder.raw_decode(text.lstrip())
    text = text.lstrip()[end:]
    print(*(sample["documents"][0]["record"] for sample in value["step"]["samples"]))'
}
last_loss() { tail -1 "$1/metrics.jsonl" | python3 -c 'import json, sys; print(json.loads(sys.stdin.read())["val_loss"])'; }
spikes_of() { python3 -c 'import json, sys
kinds = [json.loads(line)["event"] for line in open(sys.argv[1])]
print(kinds.count("skipped"), "updates skipped,", kinds.count("roll_back"), "roll-backs")' "$1/events.jsonl"; }

documents clean.jsonl </dev/null
cp clean.jsonl records.jsonl
"$lockstep" data prepare run.toml >/dev/null 2>&1
records_of 110 {170..175} {231..236} >bad.txt
rm -r runs
documents records.jsonl <bad.txt
echo "$(wc -w <bad.txt) of 12000 documents are poisoned: all of steps 110, 170 to 175 and 231 to 236 of 240"

begin=$(date +%s)
# Runs of other seeds look for false alarms alone.
for seed in 1 2 3 0; do
    "$lockstep" train run.toml --quiet --run-dir "clean-$seed" --set 'data.paths=["clean.jsonl"]' --set "train.seed=$seed" >/dev/null
    clean=$(last_loss "clean-$seed")
    printf 'clean, seed %s: validation loss %.4f, %s\n' "$seed" "$clean" "$(spikes_of "clean-$seed")"
    spikes_of "clean-$seed" | grep -q '^0 updates' || { echo "FAILED: a false alarm"; exit 1; }
done
check() {
    python3 -c 'import sys
name, loss, clean, within, events = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "within", sys.argv[5]
off = loss / clean - 1
print(f"{name}: validation loss {loss:.4f}, {100 * off:+.2f}% of the clean run, {events}")
if (abs(off) < 0.01) != within: sys.exit("FAILED: that is not what was promised")' "$1" "$(last_loss "$2")" "$clean" "$3" "$(spikes_of "$2")"
}
"$lockstep" train run.toml --quiet --run-dir without --set spikes.skip=false >/dev/null
check "poisoned, without the policy" without beyond
for layout in one dp=2 pp=2; do
    set=()
    [ "$layout" = one ] || set=(--set "parallel.$layout")
    "$lockstep" train run.toml --quiet --run-dir "with-$layout" "${set[@]}" >/dev/null 2>&1
    check "poisoned, with the policy, $layout" "with-$layout" within
done

# Waits for a roll-back that a run has not done yet, or for a moment.
until_rolling() {
    local before after
    before=$(grep -c '"to"' "$1/roll_backs.json" 2>/dev/null || true)
    for _ in $(seq $((40 + RANDOM % 160))); do
        after=$(grep -c '"to"' "$1/roll_backs.json" 2>/dev/null || true)
        [ "${before:-0}" = "${after:-0}" ] || break
        sleep 0.005
    done
    sleep "0.$(printf %03d $((RANDOM % 30)))"
}
for layout in one dp=2 pp=2; do
    set=() run=killed-$layout done_kills=0
    [ "$layout" = one ] || set=(--set "parallel.$layout")
    for _ in $(seq 1000); do
        "$lockstep" train run.toml --quiet --run-dir "$run" "${set[@]}" >/dev/null 2>&1 &
        pid=$!
        if [ "$done_kills" -lt $((kills / 3 + 1)) ]; then
            # Long enough to come to the next checkpoint now and then.
            [ $((RANDOM % 3)) -gt 0 ] || sleep "$((RANDOM % 2)).$((RANDOM % 10))"
            until_rolling "$run"
            if kill -9 $pid 2>/dev/null; then done_kills=$((done_kills + 1)); fi
        fi
        wait $pid 2>/dev/null && break
    done
    diff <(bits "with-$layout") <(bits "$run") || { echo "FAILED: $layout has other bits"; exit 1; }
    diff "with-$layout/roll_backs.json" "$run/roll_backs.json" || { echo "FAILED: other samples were left out"; exit 1; }
    echo "$layout: $done_kills kills, the bits and the samples of the run that nobody disturbed"
done
echo "$(($(date +%s) - begin)) s"
