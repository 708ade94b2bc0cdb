#!/bin/sh
# 100 GB of prepared shards, and 100 GB of Megatron's files, on sparse files: how long a run takes to start, whether memory grows, what steps wait for.
# bench/scripts/data.sh LOCKSTEP > bench/records/data.txt   (needs python3; takes a few MB of disk, removed at the end)
set -eu
lockstep=$(realpath "${1:-target/release/lockstep}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export LOCKSTEP_HARDWARE="$work/hardware" LOCKSTEP_MACHINES="$work/machines"
mkdir text
python3 - <<'P'
open("text/a.txt", "w").write("".join(f"{i} squared is {i * i}. " for i in range(20000)))
config = """[model]
vocab_size = 256
layers = 2
dim = 64
heads = 2
ffn = 128
[data]
%s
[train]
steps = 120
seq = 1024
global_batch = 8
micro_batch = 1
validate_every = 0
validation_sequences = 4
[checkpoint]
every = 0
"""
open("shards.toml", "w").write(config % 'paths = ["text"]\nprepared = "data"')
open("megatron.toml", "w").write(config % 'paths = ["tokens"]')
P
"$lockstep" data prepare shards.toml > /dev/null
python3 - <<'P'
import json, struct
# 400 more shards of 256 MiB, of which nothing but header and document table is on the disk.
about = json.load(open("data/data.json"))
for i in range(1, 401):
    tokens = (256 << 20) - 80
    name = f"train-{i}.shard"
    with open("data/" + name, "wb") as f:
        f.write(struct.pack("<8sIIQQQII16x", b"LKSHARD1", 2, 1, tokens, i, 1, 0, 0))
        f.seek(64 + tokens)
        f.write(struct.pack("<QQ", 0, 0))
    about["train"]["shards"].append({"file": name, "documents": 1, "bytes": tokens, "tokens": tokens, "xxh3": f"{i:016x}"})
for key in ["documents", "bytes", "tokens"]:
    about["train"][key] = sum(s[key] for s in about["train"]["shards"])
json.dump(about, open("data/data.json", "w"))
# A million documents of 50,000 tokens of 2 bytes.
documents, length = 1_000_000, 50_000
with open("tokens.idx", "wb") as f:
    f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
    f.write(struct.pack("<i", length) * documents)
    f.write(b"".join(struct.pack("<q", i * length * 2) for i in range(documents)))
    f.write(b"".join(struct.pack("<q", i) for i in range(documents + 1)))
open("tokens.bin", "wb").truncate(documents * length * 2)
P
echo "bench/scripts/data.sh, $(nproc) cores, $(date -u +%Y-%m-%d)"
python3 - "$lockstep" <<'P'
import json, os, subprocess, sys, time
lockstep = sys.argv[1]

def lines(path):
    try:
        return open(path).read().splitlines()
    except FileNotFoundError:
        return []

def anonymous(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0

def train(name, command, run):
    start = time.time()
    child = subprocess.Popen(command + ["--run-dir", run, "--quiet"], stdout=subprocess.DEVNULL)
    first, memory = None, {}
    while child.poll() is None:
        done = len(lines(f"{run}/metrics.jsonl"))
        if done and first is None:
            first = time.time() - start
        for at in (20, 60, 110):
            if done >= at and at not in memory:
                try:
                    memory[at] = anonymous(child.pid)
                except (FileNotFoundError, ProcessLookupError):
                    pass
        time.sleep(0.02)
    assert child.returncode == 0, child.returncode
    metrics = [json.loads(line) for line in lines(f"{run}/metrics.jsonl")]
    check = json.loads(lines(f"{run}/starts.jsonl")[-1])["data_check"]
    waits = sorted(m["data_wait_s"] / m["step_s"] for m in metrics[5:])
    # Of several processes, the one that is started here only waits for them.
    grown = "; RssAnon " + ", ".join(f"{mb:.0f} MB at step {at}" for at, mb in sorted(memory.items()))
    print(f"{name}: first step after {first:.1f} s (check: {check}){grown if command[1] == 'train' else ''}"
          + f"; waiting for data {100 * sum(waits) / len(waits):.2f}% of a step in the mean, {100 * waits[len(waits) * 99 // 100]:.1f}% at the 99th percentile")
    return [(m["loss"], m["grad_norm"]) for m in metrics]

size = lambda files: sum(os.stat(f).st_size for f in files)
disk = lambda files: sum(os.stat(f).st_blocks * 512 for f in files)
shards = ["data/" + f for f in os.listdir("data")]
print(f"prepared shards: {size(shards) / 1e9:.1f} GB in {len(shards)} files, {disk(shards) / 1e6:.1f} MB on the disk")
one = train("one process", [lockstep, "train", "shards.toml"], "run-1")
pair = ["tokens.bin", "tokens.idx"]
print(f"Megatron's files: {size(pair) / 1e9:.1f} GB, {disk(pair) / 1e6:.1f} MB on the disk")
train("one process", [lockstep, "train", "megatron.toml"], "run-2")
more = ["--set", "parallel.dp=2", "--set", "train.threads=1", "--set", "train.steps=40"]
two = train("two processes", [lockstep, "launch", "megatron.toml"] + more, "run-3")
P
echo "two processes never read the same sample: cargo test -p lockstep-train --lib two_processes (100 GB, sparse, every sample numbered)"
