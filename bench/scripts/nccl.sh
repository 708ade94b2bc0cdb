#!/usr/bin/env bash
# Ranks that are processes, over NCCL: 2 and 4 of them share the GPUs of this machine, so one GPU is enough. Collectives as every
# communicator has them, and their speed; who is there; layouts against ranks that are threads, in fp8 and fp16 too; every schedule against one rank; a rank that is killed; the trace; what
# metrics say of ranks; one rank with and without `launch`.
# usage: bench/scripts/nccl.sh LOCKSTEP [PART...] > bench/records/nccl.txt
set -uo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/nccl.sh LOCKSTEP [PART...]}")
shift
parts=${*:-conformance collectives world layouts precisions schedules kill trace busy speed}
export COLUMNS=150
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo "# bench/scripts/nccl.sh at ${COMMIT:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2> /dev/null)}"
"$lockstep" doctor | grep -E "NCCL|device 0|driver"
python3 -c "
for i in range(60000): print(i % 31, 'times', i % 17, 'is', (i % 31) * (i % 17))" > text.txt
cat > run.toml <<'TOML'
[model]
vocab_size = 256
layers = 4
dim = 256
heads = 4
kv_heads = 4
ffn = 512
[data]
paths = ["text.txt"]
tokenizer = "bytes"
[train]
seq = 256
global_batch = 8
micro_batch = 2
steps = 7
device = "cuda"
validation_sequences = 0
[parallel]
timeout = 60.0
TOML

# RANKS COMMAND...: that command as this many processes, each for NCCL on a host of its own.
processes() {
    local ranks=$1 port=$((20000 + RANDOM % 20000)) pids=() code=0
    shift
    for ((r = 0; r < ranks; r++)); do
        RANK=$r WORLD_SIZE=$ranks LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port NCCL_HOSTID="bench-$$-$r" \
            timeout 60 "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=1; done
    return $code
}

conformance() {
    for ranks in 2 4; do
        local start=$SECONDS
        processes $ranks "$lockstep" doctor --world --conformance --device cuda 2>&1 | grep -v "^$" || echo "FAILED: conformance of $ranks"
        echo "  $((SECONDS - start)) s"
    done
}

collectives() {
    for ranks in 2 4; do
        "$lockstep" bench collectives --ranks $ranks --processes --device cuda --share-gpus --from 64KiB --to 64MiB --seconds 0.05 2>&1 \
            || echo "FAILED: collectives of $ranks"
    done
    "$lockstep" bench collectives --ranks 2 --device cuda --from 1MiB --to 64MiB --only all_reduce --only send_receive 2>&1 \
        || echo "FAILED: collectives of threads"
}

world() {
    processes 2 "$lockstep" doctor --world 2>&1
}

# Losses of two runs: equal bits, or the largest relative difference; median steps.
compare() {
    python3 - "$1" "$2" "$3" "$4" <<'PYTHON'
import json, sys
name, bound = sys.argv[1], float(sys.argv[4])
def read(run):
    return [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
try:
    a, b = read(sys.argv[2]), read(sys.argv[3])
except OSError as error:
    sys.exit(print(f"{name:44} FAILED: {error}"))
step = lambda run: 1e3 * sorted(line["step_s"] for line in run[3:])[len(run[3:]) // 2]
worst = max(abs(x["loss"] - y["loss"]) / abs(x["loss"]) for x, y in zip(a, b))
how = "the same bits" if worst == 0 else f"within {worst:.1e}"
verdict = "ok" if len(a) == len(b) and worst <= bound else "FAILED"
print(f"{name:44} {verdict:6} {how:16} median step: threads {step(a):7.1f} ms, processes {step(b):7.1f} ms")
PYTHON
}

# NAME BOUND KEY=VALUE...
layout() {
    local name=$1 bound=$2 set=()
    shift 2
    for pair in "$@"; do set+=(--set "$pair"); done
    rm -rf threads processes
    timeout 100 "$lockstep" train run.toml --quiet --run-dir threads "${set[@]}" > log 2>&1 || tail -5 log
    timeout 100 "$lockstep" launch run.toml --quiet --share-gpus --run-dir processes "${set[@]}" > log 2>&1 || tail -8 log
    compare "$name" threads processes "$bound"
}

layouts() {
    # fp32: what is left of the order of sums. Deterministic: sums in the order of ranks, so no difference at all.
    local p=parallel bits=train.deterministic=true
    layout "dp=2" 1e-5 $p.dp=2
    layout "dp=2 zero=3" 1e-5 $p.dp=2 $p.zero=3
    layout "tp=2 sp" 1e-5 $p.tp=2 $p.sequence_parallel=true
    layout "pp=2 1f1b" 1e-5 $p.pp=2 train.micro_batch=1
    layout "pp=2 interleaved" 1e-5 $p.pp=2 $p.schedule=interleaved train.micro_batch=1
    layout "cp=2" 1e-5 $p.cp=2
    layout "cp=2 a2a" 1e-5 $p.cp=2 $p.context=a2a
    layout "cp=2 a2a tp=2 sp, bf16" 2e-2 $p.cp=2 $p.context=a2a $p.tp=2 $p.sequence_parallel=true precision.policy=bf16
    layout "dp=4 zero=3" 1e-5 $p.dp=4 $p.zero=3
    layout "dp=2 tp=2 sp, bf16" 2e-2 $p.dp=2 $p.tp=2 $p.sequence_parallel=true precision.policy=bf16
    layout "dp=2 pp=2 1f1b zero=2" 1e-5 $p.dp=2 $p.pp=2 $p.zero=2 train.micro_batch=1
    layout "tp=2 pp=2 interleaved" 1e-5 $p.tp=2 $p.pp=2 $p.schedule=interleaved train.micro_batch=1
    layout "pp=4 1f1b" 1e-5 $p.pp=4 train.micro_batch=1
    layout "cp=4" 1e-5 $p.cp=4
    layout "ep=2, mixtral" 1e-5 $p.ep=2 model.architecture=mixtral model.experts=4
    layout "dp=2 ep=2 zero=3, mixtral, bf16" 2e-2 $p.dp=2 $p.ep=2 $p.zero=3 model.architecture=mixtral model.experts=4 precision.policy=bf16
    layout "dp=4, deterministic" 0 $p.dp=4 $bits
    layout "dp_replicate=2 dp=2 zero=3, deterministic" 0 $p.dp_replicate=2 $p.dp=2 $p.zero=3 $bits
    layout "cp=2 tp=2 sp, bf16, deterministic" 0 $p.cp=2 $p.tp=2 $p.sequence_parallel=true precision.policy=bf16 $bits
}

# The same with numbers of other formats, which travel too: every recipe of fp8 over an axis that it has to agree over.
precisions() {
    local p=parallel bits=train.deterministic=true fp8=(precision.policy=fp8 precision.fp8_weights=0)
    layout "dp=2 zero=3, fp8" 0 $p.dp=2 $p.zero=3 "${fp8[@]}" $bits
    layout "tp=2 sp, fp8" 0 $p.tp=2 $p.sequence_parallel=true "${fp8[@]}" $bits
    layout "dp=2 ep=2, mixtral, fp8" 0 $p.dp=2 $p.ep=2 model.architecture=mixtral model.experts=4 "${fp8[@]}" $bits
    fp8+=(precision.fp8_recipe=delayed)
    layout "dp=2 tp=2 sp, fp8 delayed" 0 $p.dp=2 $p.tp=2 $p.sequence_parallel=true "${fp8[@]}" $bits
    layout "cp=2, fp8 delayed" 0 $p.cp=2 "${fp8[@]}" $bits
    layout "pp=2 zb-v, fp8 delayed" 0 $p.pp=2 $p.schedule=zb-v train.micro_batch=1 "${fp8[@]}" $bits
    layout "tp=2 sp, fp8 rowwise" 0 $p.tp=2 $p.sequence_parallel=true "${fp8[@]}" precision.fp8_recipe=rowwise $bits
    layout "dp=2 zero=3, fp8 block" 0 $p.dp=2 $p.zero=3 "${fp8[@]}" precision.fp8_recipe=block $bits
    layout "dp=2 zero=3, fp16" 0 $p.dp=2 $p.zero=3 precision.policy=fp16 $bits
}

# Every schedule with four stages alone, and with two stages beside each other axis, over the same processes one after the other.
schedules() {
    local layouts=()
    for schedule in 1f1b gpipe interleaved,virtual=2 zb-h1 zb-v; do
        for beside in pp=2 pp=4 dp=2,pp=2 dp=2,zero=3,pp=2 tp=2,sp,pp=2 cp=2,pp=2; do layouts+=(--layouts "$beside,$schedule"); done
    done
    "$lockstep" verify run.toml --full-size --steps 3 --processes --device cuda --share-gpus --set model.layers=8 --set train.micro_batch=1 \
        "${layouts[@]}" 2> log || { tail -8 log; echo "FAILED: schedules"; }
}

kill_a_rank() {
    for victim in 2 0; do
        rm -rf killed
        "$lockstep" launch run.toml --quiet --share-gpus --run-dir killed --set train.steps=100000 --set parallel.dp=2 \
            --set parallel.pp=2 > log 2>&1 &
        local launcher=$! until=$((SECONDS + 60))
        until [ "$(cat killed/metrics.jsonl 2> /dev/null | wc -l)" -ge 20 ] || [ $SECONDS -gt $until ]; do sleep 0.1; done
        local pid
        for pid in $(pgrep -P $launcher); do
            grep -qzx "RANK=$victim" "/proc/$pid/environ" && break
        done
        local start
        start=$(date +%s%N)
        kill -9 "$pid"
        wait $launcher
        local code=$?
        echo "kill -9 of rank $victim of 4 (dp=2 pp=2): all ended after $((($(date +%s%N) - start) / 1000000)) ms, exit code $code"
        grep "^error" log
    done
}

# NAME KEY=VALUE...: which collectives run beside kernels.
traced() {
    local name=$1 set=()
    shift
    for pair in "$@"; do set+=(--set "$pair"); done
    rm -rf traced
    "$lockstep" launch run.toml --quiet --share-gpus --run-dir traced "${set[@]}" --profile-steps 5:6 > log 2>&1 || tail -5 log
    python3 - traced/profile-5-6.json "$name" <<'PYTHON'
import json, sys
events = [e for e in json.load(open(sys.argv[1])) if e["ph"] == "X"]
kernels, transfers = ([e for e in events if e["tid"] == tid] for tid in (0, 1))
beside = lambda c: sum(max(0, min(c["ts"] + c["dur"], k["ts"] + k["dur"]) - max(c["ts"], k["ts"])) for k in kernels)
print(f"trace of {sys.argv[2]}, 2 steps:")
for kind in sorted({c["name"] for c in transfers}):
    each = [(beside(c), c) for c in transfers if c["name"] == kind]
    print(f"  {len(each)} {kind} on the communication stream, {sum(c['dur'] for _, c in each) / 1e3:.1f} ms in all; "
          f"{sum(s > 0 for s, _ in each)} of them ran beside kernels, {sum(s for s, _ in each) / 1e3:.1f} ms")
    s, c = max(each, key=lambda pair: pair[0])
    names = sorted({k["name"] for k in kernels if k["ts"] < c["ts"] + c["dur"] and c["ts"] < k["ts"] + k["dur"]})
    print(f"    one of layer {c['args']['layer']}: {c['dur'] / 1e3:.2f} ms, {s / 1e3:.2f} ms of it beside {', '.join(names[:6])}")
PYTHON
}

trace() {
    local wide=(model.dim=1024 model.ffn=4096)
    traced "dp=2 zero=3" parallel.dp=2 parallel.zero=3 "${wide[@]}"
    traced "ep=2, deepseek with two shared experts" parallel.ep=2 model.architecture=deepseek model.experts=8 \
        model.experts_per_token=2 model.expert_ffn=1024 model.shared_experts=2 precision.policy=bf16 "${wide[@]}"
}

# The program of stage 1 has three of four layers.
busy() {
    rm -rf busy
    "$lockstep" launch run.toml --quiet --share-gpus --run-dir busy --set parallel.pp=2 --set parallel.stages='[1, 3]' --set train.steps=40 \
        --set model.dim=1024 --set model.ffn=4096 --set train.micro_batch=1 > log 2>&1 || tail -5 log
    python3 - <<'PYTHON'
import json
steps = [json.loads(line) for line in open("busy/metrics.jsonl")][20:]
middle = lambda numbers: sorted(numbers)[len(numbers) // 2]
ranks = [1e3 * middle([step["rank_busy_s"][rank] for step in steps]) for rank in (0, 1)]
print(f"pp=2 with 1 and 3 layers: a step takes {1e3 * middle([step['step_s'] for step in steps]):.1f} ms; "
      f"rank 0 computes for {ranks[0]:.1f} ms of it, rank 1 for {ranks[1]:.1f} ms")
PYTHON
    grep -h "computes for" log
}

speed() {
    # In turns, so that the clocks of the device are the same for both.
    for round in 1 2 3; do
        for verb in train launch; do
            rm -rf "one-$verb-$round"
            "$lockstep" $verb run.toml --quiet --run-dir "one-$verb-$round" --set train.steps=100 --set model.dim=1024 --set model.ffn=4096 \
                --set model.layers=8 --set train.seq=1024 --set precision.policy=bf16 > log 2>&1 || tail -5 log
        done
    done
    python3 - <<'PYTHON'
import json
def median(verb):
    steps = [json.loads(line)["step_s"] for round in (1, 2, 3) for line in list(open(f"one-{verb}-{round}/metrics.jsonl"))[20:]]
    return 1e3 * sorted(steps)[len(steps) // 2]
train, launch = median("train"), median("launch")
print(f"one rank, median of 240 steps: train {train:.3f} ms, launch {launch:.3f} ms, {100 * (launch / train - 1):+.2f}%")
PYTHON
}

for part in $parts; do
    echo "## $part"
    if [ "$part" = kill ]; then kill_a_rank; else $part; fi
done
