#!/usr/bin/env bash
# Trains small runs whose metrics go to MLflow's own server, which is killed, stopped and started again meanwhile, and asks its client
# what has arrived: bench/scripts/mlflow.sh LOCKSTEP [VENV]
# VENV is a Python environment with mlflow; where it is not there it is made, and mlflow installed from PyPI. Without it, `mlflow` is
# that of PATH. Fails where a number is missing or differs.
set -euo pipefail
lockstep=$(realpath "$1")
if [ $# -gt 1 ]; then
    [ -x "$2/bin/mlflow" ] || { python3 -m venv "$2" && "$2/bin/pip" install --quiet mlflow; }
    PATH=$(realpath "$2")/bin:$PATH
fi
work=$(mktemp -d)
server=
# The server is a group of processes that this script has started.
end_server() { if [ -n "$server" ]; then kill -CONT -- "-$server"; kill -9 -- "-$server"; wait "$server" || true; server=; fi 2>/dev/null; }
run=
trap 'end_server; [ -z "$run" ] || kill -9 "$run" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MLFLOW_TRACKING_URI=http://127.0.0.1:$port
start_server() {
    setsid mlflow server --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port "$port" --workers 1 >>server.log 2>&1 &
    server=$!
    for _ in $(seq 600); do
        if python3 -c "import urllib.request as u; u.urlopen('$MLFLOW_TRACKING_URI/health', timeout=2)" 2>/dev/null; then return; fi
        sleep 0.2
    done
    echo "the server does not start:" && tail server.log && exit 1
}

mkdir corpus
for file in 0 1 2 3; do seq -f "line %g of $file" 4000 >"corpus/$file.txt"; done
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 4
kv_heads = 2
ffn = 128
[data]
paths = ["corpus"]
[train]
seq = 64
global_batch = 16
device = "cpu"
validation_sequences = 8
[telemetry]
mlflow = true
TOML

steps() { if [ -f "$1/metrics.jsonl" ]; then wc -l <"$1/metrics.jsonl"; else echo 0; fi; }
wait_for() { while [ "$(steps "$1")" -lt "$2" ]; do sleep 0.1; done; }
# What the server has of the run in a folder, beside its metrics.jsonl.
compare() {
    python3 - "$1" "$2" <<'PY'
import json, sys
from mlflow.tracking import MlflowClient
folder, expected = sys.argv[1:]
client = MlflowClient()
experiment = client.get_experiment_by_name("lockstep")
runs = [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == folder]
assert len(runs) == 1, f"{len(runs)} runs named {folder}"
run = runs[0]
assert run.info.status == expected, run.info.status
lines = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
values = 0
for key in ["loss", "grad_norm", "lr", "tokens_per_s", "val_loss"]:
    there = {(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)}
    for line in lines:
        if line.get(key) is not None:
            assert (line["step"], line[key]) in there, (key, line["step"], line[key])
            values += 1
saved = sorted({m.step for m in client.get_metric_history(run.info.run_id, "events/checkpoint")})
system = sum(key.startswith("system/") for key in run.data.metrics)
print(f"  {run.info.status}: {values} values of {len(lines)} steps are equal; {len(run.data.params)} parameters, "
      f"{len(run.data.tags)} tags, {system} system metrics, checkpoints at steps {saved[0]} to {saved[-1]}, "
      f"hosts {'named' if run.data.tags.get('lockstep.hosts') else 'missing'}")
PY
}
# The median step of some lines, in milliseconds.
median() {
    python3 - "$@" <<'PY'
import json, statistics, sys
folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
times = [json.loads(line)["step_s"] for line in open(f"{folder}/metrics.jsonl")][first:last]
print(f"median step {1e3 * statistics.median(times):.1f} ms, longest {1e3 * max(times):.1f} ms")
PY
}

# The number of steps that take a minute and a half here.
"$lockstep" train run.toml --run-dir timed --quiet --set train.steps=60 --set telemetry.mlflow=false >/dev/null 2>&1
n=$(python3 -c 'import json, statistics as s; print(max(600, int(90 / s.median(json.loads(l)["step_s"] for l in open("timed/metrics.jsonl")))))')
train() {
    local dir=$1 steps=$2
    shift 2
    exec "$lockstep" train run.toml --run-dir "$dir" --quiet --set "train.steps=$steps" --set "train.validate_every=$((n / 6))" \
        --set "checkpoint.every=$((n / 12))" "$@"
}

echo "mlflow $(mlflow --version | grep -o '[0-9.]*$'), $("$lockstep" --version)"
start_server
echo "a run with the server killed, started again, stopped for 8 s"
train first "$n" >first.out 2>&1 &
run=$!
wait_for first $((n / 6))
killed=$(steps first)
end_server
wait_for first $((n / 3))
back=$(steps first)
start_server
wait_for first $(($(steps first) + n / 12))
stopped=$(steps first)
kill -STOP -- "-$server"
sleep 8
went_on=$(steps first)
kill -CONT -- "-$server"
wait "$run"
echo "  with the server $(median first 20 "$killed"); while it was down $(median first "$killed" "$back"); while it was stopped $(median first "$stopped" "$went_on") over $((went_on - stopped)) steps"
compare first FINISHED
sed 's/^/  said: /' first.out

echo "a run that ends while the server is down, and its resume"
train second $((n / 3)) >second.out 2>&1 &
run=$!
wait_for second $((n / 6))
end_server
wait "$run"
sed 's/^/  said: /' second.out | sed "s#$MLFLOW_TRACKING_URI#the server#g"
start_server
(train second $((n / 3)) --change "train.steps=$((n / 3 + 100))") 2>&1 | sed 's/^/  said: /'
compare second FINISHED

echo "a run that is killed with the server, and its resume"
train third $((n / 3)) >/dev/null 2>&1 &
run=$!
wait_for third $((n / 6))
end_server
wait_for third $((n / 6 + n / 12))
kill -9 "$run"
wait "$run" 2>/dev/null || true
start_server
(train third $((n / 3))) 2>&1 | sed 's/^/  said: /'
compare third FINISHED

echo "a run that is interrupted"
train fourth "$n" >/dev/null 2>&1 &
run=$!
wait_for fourth $((n / 12 + 10))
kill -TERM "$run"
wait "$run" || echo "  exit code $?"
compare fourth KILLED
