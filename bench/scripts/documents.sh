#!/usr/bin/env bash
# A step with document masks beside one without, on documents of mean 1,000 tokens (exponential lengths): medians of metrics.jsonl.
#   bench/scripts/documents.sh LOCKSTEP [PRESET [BATCH [more arguments of train]]]
set -euo pipefail
lockstep=$1 preset=${2:-llama-124m} batch=${3:-16}
shift $(($# < 3 ? $# : 3))
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - "$folder/documents.jsonl" <<'PYTHON'
import json, random, sys
random.seed(1)
words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(2000)]
with open(sys.argv[1], "w") as out:
    for _ in range(12000):
        count = max(3, int(random.expovariate(1 / 1000) / 6.5))
        out.write(json.dumps({"text": " ".join(random.choices(words, k=count))}) + "\n")
PYTHON
cat > "$folder/run.toml" <<TOML
[model]
preset = "$preset"
vocab_size = 256
[data]
paths = ["documents.jsonl"]
tokenizer = "bytes"
[train]
steps = 14
seq = 4096
global_batch = $batch
micro_batch = $batch
validation_sequences = 0
[optimizer]
warmup_steps = 2
TOML
for mask in false true; do
    "$lockstep" train "$folder/run.toml" --run-dir "$folder/$mask" --set "data.document_mask=$mask" --quiet "$@" >&2
    python3 - "$folder/$mask/metrics.jsonl" "$mask" <<'PYTHON'
import json, statistics, sys
steps = [json.loads(line)["step_s"] for line in open(sys.argv[1])][4:]
print(f"document_mask = {sys.argv[2]}: median {1e3 * statistics.median(steps):.1f} ms per step")
PYTHON
done
