#!/usr/bin/env bash
# Trains a small run whose metrics go to the real client of Weights & Biases, offline, kills the client's process and then the run,
# resumes it, and reads the client's files back with its own code: bench/scripts/wandb.sh LOCKSTEP [VENV]
# VENV is a Python environment with wandb; where it is not there it is made, and wandb installed from PyPI. Without it, `python3` of
# PATH must have it. Nothing is uploaded. Fails where a number is missing or differs.
set -euo pipefail
lockstep=$(realpath "$1")
if [ $# -gt 1 ]; then
    [ -x "$2/bin/wandb" ] || { python3 -m venv "$2" && "$2/bin/pip" install --quiet wandb; }
    PATH=$(realpath "$2")/bin:$PATH
fi
work=$(mktemp -d)
run=
trap '[ -z "$run" ] || kill -9 "$run" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
export WANDB_MODE=offline WANDB_CACHE_DIR=$work/cache WANDB_CONFIG_DIR=$work/config WANDB_DATA_DIR=$work/staged
mkdir corpus
for file in 0 1 2 3; do seq -f "line %g of $file" 4000 >"corpus/$file.txt"; done
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 128
heads = 4
kv_heads = 2
ffn = 256
[data]
paths = ["corpus"]
[train]
steps = 900
seq = 64
global_batch = 16
device = "cpu"
validate_every = 200
validation_sequences = 8
[checkpoint]
every = 100
[telemetry]
wandb = true
experiment = "mine"
TOML
steps() { if [ -f run/metrics.jsonl ]; then wc -l <run/metrics.jsonl; else echo 0; fi; }
wait_for() { while [ "$(steps)" -lt "$1" ]; do sleep 0.1; done; }

echo "wandb $(python3 -c 'import wandb; print(wandb.__version__)'), $("$lockstep" --version)"
"$lockstep" train run.toml --run-dir run --quiet >first.out 2>&1 &
run=$!
wait_for 300
helper=$(pgrep -P "$run" | head -1)
kill -9 "$helper"
echo "the client's process was killed after step $(steps)"
wait_for 700
kill -9 "$run"
wait "$run" 2>/dev/null || true
echo "the run was killed after step $(steps)"
"$lockstep" train run.toml --run-dir run --quiet 2>&1 | sed 's/^/  said: /'
sed 's/^/  said: /' first.out
python3 - <<'PY'
import glob, json, math, struct
from wandb.proto import wandb_internal_pb2 as pb


def records(path):
    """The records of a file, by the client's own reader where it has one."""
    try:
        from wandb.sdk.internal.datastore import DataStore
    except ImportError:
        yield from parsed(path)
        return
    store = DataStore()
    store.open_for_scan(path)
    while True:
        try:
            data = store.scan_data()
        except AssertionError:
            # The last record of a process that was killed.
            return
        if data is None:
            return
        record = pb.Record()
        record.ParseFromString(data)
        yield record


def parsed(path):
    """The records of a file of the client: its protocol buffers in blocks as LevelDB writes its log."""
    data = open(path, "rb").read()
    assert data[:4] == b":W&B", path
    at, part = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def items(all):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in all}


ids, config, history, ended, machine = set(), {}, {}, [], 0
files = sorted(glob.glob("run/wandb/offline-run-*/*.wandb"))
for path in files:
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            ids.add(record.run.run_id)
            config |= items(record.run.config.update)
            assert record.run.project == "mine" and record.run.display_name == "run"
        elif kind == "config":
            config |= items(record.config.update)
        elif kind == "history":
            values = items(record.history.item)
            history.setdefault(int(values["step"]), {}).update(values)
        elif kind == "exit":
            ended.append(record.exit.exit_code)
        elif kind == "stats":
            machine += 1
assert len(ids) == 1, ids
lines = [json.loads(line) for line in open("run/metrics.jsonl")]
values = 0
for line in lines:
    for key in ["loss", "grad_norm", "lr", "tokens_per_s", "val_loss"]:
        if line.get(key) is not None:
            assert history[line["step"]][key] == line[key], (line["step"], key)
            values += 1
saved = [step for step, values in sorted(history.items()) if "events/checkpoint" in values]
start = config["lockstep"]
print(f"{len(files)} offline runs with one id; {values} values of {len(lines)} steps are equal; config with {len(config)} keys, "
      f"model.layers = {config['model.layers']}, version {start['build']['version']}, {len(start['hosts'])} host; "
      f"checkpoints at steps {saved[0]} to {saved[-1]}; exit codes {ended}; {machine} samples of the client's system metrics")
PY
wandb sync --help | grep -q -- --dry-run && wandb sync --dry-run run/wandb/offline-run-* 2>&1 | sed "s#$work/##g; s#^#  sync: #"
ls run/wandb | sed 's/^/  file: /'
