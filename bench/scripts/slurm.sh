#!/usr/bin/env bash
# Shows Lockstep under a real Slurm, longer than a test may take: bench/scripts/slurm.sh LOCKSTEP [STEPS]
# STEPS must take the machine longer than half a minute, or nothing is interrupted.
# A Slurm of virtual nodes on this machine (Debian's slurmctld, slurmd, slurm-client, munge); its output is bench/records/slurm.txt.
set -euo pipefail
lockstep=$(realpath "$1") here=$(realpath "$(dirname "$0")")
work=$(mktemp -d /tmp/lsXXXX)
trap '"$here/slurm-cluster.sh" down "$work/slurm"; rm -rf "$work"' EXIT
cd "$work"
"$here/slurm-cluster.sh" up "$work/slurm" 4 4 $((13000 + $$ % 5000))
export SLURM_CONF=$work/slurm/slurm.conf
mkdir corpus && cp "$here"/../../docs/*.md corpus
cat >run.toml <<TOML
[model]
vocab_size = 256
layers = 4
dim = 64
heads = 4
ffn = 128

[data]
paths = ["corpus"]

[train]
steps = ${2:-2000}
seq = 64
global_batch = 16
micro_batch = 2
validate_every = 500

[parallel]
dp = 2
tp = 2

[checkpoint]
every = 200

[cluster]
time = "1"
nodes = 2
signal_before = 30
TOML

state() { scontrol -o show job "$1" | sed 's/.*JobState=\([A-Z_]*\).*/\1/'; }
number() { sed -n 's/^submitted jobs\{0,1\} \([^:]*\):.*/\1/p' | tr -d ' '; }
# Waits until a job has ended, which none of these takes longer for than 15 minutes.
ended() {
    for _ in $(seq 900); do
        case $(state "$1") in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL) return ;; esac
        sleep 1
    done
}
bits() { sed 's/.*"step":\([0-9]*\).*"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2 \3/' "$1/metrics.jsonl"; }
same() { if cmp -s <(bits "$1") <(bits threads); then echo "the bits of threads"; else echo "OTHER BITS than threads"; fi; }
report() { # name job run
    local runs
    runs=$(grep -hcE 'starting, files in|resuming at step' "$3"/slurm-*.log | paste -sd+ | bc)
    echo "$1: $(state "$2") after $runs attempts, $(grep -hoE 'interrupted after step [0-9]+' "$3"/slurm-*.log | paste -sd, || true); $(same "$3")"
}

echo "commit $(git -C "$here" rev-parse --short HEAD), $(slurmctld -V), $(nproc) cores, 4 virtual nodes"
"$lockstep" train run.toml --run-dir threads --quiet
echo "== time limit of one minute, signal 30 s before it, requeued until the run is done"
job=$("$lockstep" launch run.toml --slurm --run-dir requeue 2>/dev/null | tee >(cat >&2) | number)
ended "$job"
report requeue "$job" requeue
echo "== the same as a chain of 6 jobs that are not requeued"
jobs=$("$lockstep" launch run.toml --slurm --chain 6 --run-dir chain 2>/dev/null | tee >(cat >&2) | number)
for job in ${jobs//,/ }; do ended "$job"; done
for job in ${jobs//,/ }; do echo "  job $job: $(state "$job")"; done
report chain "${jobs##*,}" chain
for plugin in pmi2 pmix; do
    # One that is listed may lack its library.
    if timeout 20 srun --mpi="$plugin" true >/dev/null 2>&1; then
        echo "== srun --mpi=$plugin"
        job=$("$lockstep" launch run.toml --slurm --run-dir "mpi-$plugin" --time 10 --set "cluster.srun=[\"--mpi=$plugin\"]" \
            --set train.steps=20 2>/dev/null | number)
        ended "$job"
        echo "  $(state "$job"): $(grep -h ' processes on ' "mpi-$plugin"/slurm-*.log)"
    fi
done
