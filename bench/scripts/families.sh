#!/bin/sh
# Random small models of every family, made by Hugging Face transformers, beside what this checkout computes of their files: losses, logits,
# gradients, and files that come out as they went in.
#
#     bench/scripts/families.sh [COUNT [FAMILY...]]
#
# COUNT    models of each family (8)
# FAMILY   as config.json calls it, all of them if none is given
#
# Environment: PYTHON (python3, with torch and transformers 5), FOLDER (where the models go; a new one in TMPDIR if not given).
set -eu
repository=$(cd "$(dirname "$0")/../.." && pwd)
count=${1:-8}
[ $# -eq 0 ] || shift
folder=${FOLDER:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 130' INT TERM HUP
fi
models=$folder/models
mkdir -p "$folder"
"${PYTHON:-python3}" "$repository/crates/train/tests/golden/families.py" "$models" "$count" "$@" >"$folder/made.txt"
versions=$("${PYTHON:-python3}" -c 'import torch, transformers; print(f"torch {torch.__version__}, transformers {transformers.__version__}")')
commit=$(git -C "$repository" rev-parse --short HEAD)
echo "# bench/scripts/families.sh $count $*; commit $commit; $(uname -m), $(nproc) cores; $versions"
echo "# Errors are max|a-b| / max|b| against transformers in float64; gradients are those of the worst tensor."
cd "$repository"
# Ends with a failure where a loss or a logit differs by more than 2e-6 or a gradient by more than 1e-4.
LOCKSTEP_FAMILIES=$models cargo test --quiet -p lockstep-train --test families -- --nocapture --test-threads 1
