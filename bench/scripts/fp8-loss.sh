#!/usr/bin/env bash
# Validation loss and speed of fp8 beside bf16: llama-124m with 8,192 tokens of vocabulary, 2,000 steps of 8,192 tokens of source code, three seeds.
#
#     bench/scripts/fp8-loss.sh LOCKSTEP data FOLDER                       # needs cargo, pip and a network; 2 to 4 minutes on two cores
#     bench/scripts/fp8-loss.sh LOCKSTEP train FOLDER [VARIANT...] > bench/records/fp8-loss.txt       # needs a GPU and Python
#
# `data` downloads the packages that fp8_loss.py lists, trains a tokenizer on them and writes all that `train` needs into FOLDER (34 MB: tokens of
# training and validation, tokenizer.json, run.toml), which can be moved to another machine. `train` trains bf16 and fp8 (every layer) with each seed, the
# variants with the first seed (one whose name ends in + with every seed), prints the comparison, and writes fp8-loss.csv and fp8-loss.svg to bench/records. A VARIANT is NAME:KEY=VALUE,KEY=VALUE of
# config keys on top of run.toml: fp8-large:precision.policy=fp8. Runs that the same binary has finished in FOLDER/runs with the same options stay.
#
# Environment: SEEDS ("1 2 3"), RECORDS (bench/records), NAME (fp8-loss, of the files there), POLICIES ("fp8": what is trained beside bf16 with every
# seed; empty for variants alone), EXTRA (more options of `train` for every run: "--set train.steps=30 --set train.device=cpu").
set -euo pipefail
usage() {
    echo "usage: fp8-loss.sh LOCKSTEP data FOLDER | LOCKSTEP train FOLDER [NAME:KEY=VALUE,...]..." >&2
    exit 2
}
[ $# -ge 3 ] || usage
lockstep=$(realpath "$1") part=$2 folder=$3
[ -x "$lockstep" ] || { echo "fp8-loss.sh: $1 is no program" >&2; usage; }
shift 3
here=$(cd "$(dirname "$0")" && pwd)
helper=$here/fp8_loss.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_data() {
    mkdir -p "$work/crates/src" "$work/wheels" "$folder"
    # A library that depends on the crates: `cargo metadata` downloads them, and says where they are.
    touch "$work/crates/src/lib.rs"
    python3 "$helper" manifest >"$work/crates/Cargo.toml"
    (cd "$work/crates" && cargo metadata --quiet --format-version 1 --filter-platform x86_64-unknown-linux-gnu) >"$work/metadata.json"
    # Wheels of pure Python, which are the same for every machine.
    python3 "$helper" wheels >"$work/wheels.txt"
    python3 -m pip download --quiet --no-deps --only-binary :all: --platform any --implementation py --abi none --python-version 3.12 \
        --dest "$work/wheels" --requirement "$work/wheels.txt"
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet tokenizers==0.21.4
    "$work/venv/bin/python" "$helper" corpus "$work/metadata.json" "$work/wheels" "$work"
    # Each split is prepared and exported alone. Of exported tokens the last documents validate, whatever the seed is.
    for split in train validation; do
        "$lockstep" data prepare "$work/run.toml" --set "data.paths=[\"$split.jsonl\"]" --set data.validation_fraction=0 --out "$work/$split" >&2
        "$lockstep" data export "$work/$split" --out "$work/$split-tokens" >&2
        mv "$work/$split-tokens/train.bin" "$folder/$split.bin"
        mv "$work/$split-tokens/train.idx" "$folder/$split.idx"
    done
    cp "$work/tokenizer.json" "$work/run.toml" "$folder"
    "$lockstep" train "$folder/run.toml" --run-dir "$work/dry-run" --dry-run --set train.device=cpu >&2
    "$lockstep" data inspect "$folder/run.toml" --format json | python3 "$helper" check
    du -sh "$folder"
}

# Trains into FOLDER/runs/NAME-SEED, unless that is there from the same binary with the same options. The checkpoint of the last step is removed.
run_one() {
    local name=$1 seed=$2 run=$folder/runs/$1-$2 command
    shift 2
    command="$build ${extra[*]} $*"
    if [ "$(cat "$run/command.txt" 2>/dev/null)" = "$command" ]; then
        echo "$name, seed $seed: there already" >&2
        return
    fi
    echo "$name, seed $seed" >&2
    rm -rf "$run" "$run.unfinished"
    "$lockstep" train "$folder/run.toml" --run-dir "$run.unfinished" --quiet --set "train.seed=$seed" "${extra[@]}" "$@" >&2 || return 1
    rm -rf "$run.unfinished/checkpoints"
    echo "$command" >"$run.unfinished/command.txt"
    mv "$run.unfinished" "$run"
}

train_all() {
    [ -e "$folder/run.toml" ] || { echo "fp8-loss.sh: $folder has no run.toml: make it with \`data\`" >&2; exit 2; }
    local seeds seed extra build variant name names=" bf16 fp8 " settings setting options runs=() failed=0
    read -ra seeds <<<"${SEEDS:-1 2 3}"
    read -ra extra <<<"${EXTRA:-}"
    build=$(sha256sum "$lockstep" | cut -c1-16)
    for variant in "$@"; do
        [[ $variant =~ ^[A-Za-z0-9._-]+\+?:[a-z0-9_]+\.[a-z0-9_]+= ]] || { echo "fp8-loss.sh: $variant is not NAME:KEY=VALUE,..." >&2; usage; }
        name=${variant%%:*}
        [[ $names != *" $name "* ]] || { echo "fp8-loss.sh: there is a $name already" >&2; exit 2; }
        names+="$name "
    done
    for seed in "${seeds[@]}"; do
        run_one bf16 "$seed" --set precision.policy=bf16
        runs+=("bf16:$seed")
        [ -n "${POLICIES-fp8}" ] || continue
        run_one fp8 "$seed" --set precision.policy=fp8 --set precision.fp8_weights=0
        runs+=("fp8:$seed")
    done
    for variant in "$@"; do
        name=${variant%%:*} options=()
        IFS=, read -ra settings <<<"${variant#*:}"
        for setting in "${settings[@]}"; do options+=(--set "$setting"); done
        local of=("${seeds[0]}")
        [[ $name != *+ ]] || of=("${seeds[@]}")
        name=${name%+}
        for seed in "${of[@]}"; do
            if ! run_one "$name" "$seed" "${options[@]}"; then
                echo "FAILED: $variant, left out of the report" >&2
                failed=1
                continue
            fi
            runs+=("$name:$seed")
        done
    done
    # The report ends the line with the machine and the build.
    echo -n "$ ${SEEDS:+SEEDS=\"$SEEDS\" }${EXTRA:+EXTRA=\"$EXTRA\" }bench/scripts/fp8-loss.sh LOCKSTEP train FOLDER${*:+ $*}        "
    python3 "$helper" report "$folder/runs" "${RECORDS:-$here/../records}" "${runs[@]}"
    return $failed
}

case $part in
data) [ $# -eq 0 ] || usage; make_data ;;
train) train_all "$@" ;;
*) usage ;;
esac
