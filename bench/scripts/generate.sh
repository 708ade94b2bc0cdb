#!/usr/bin/env bash
# Generation: prompts read and tokens written in a second, each against its bound; beside a peer where one is named.
# usage: bench/scripts/generate.sh LOCKSTEP [DEVICE] > bench/records/generate.txt
#   DEVICE  cuda (1b, 8b) or cpu (15m, 124m); cuda where none is given.
#   PEER    in the environment: a command that takes a shape (1b, 8b) and --batch N, and prints its own line.
set -uo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/generate.sh LOCKSTEP [DEVICE]}")
device=${2:-cuda}
echo "# bench/scripts/generate.sh $device at ${COMMIT:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null)}"
ours() {
    local name=$1 out
    shift
    if out=$(timeout 200 "$lockstep" bench generate --device "$device" "$@" 2>&1); then
        printf "%s\n%s\n" "== $name" "$(grep -E "^(prefill|decode|bound|memory)" <<<"$out" | sed 's/^/  /')"
    else
        printf "%s\n  FAILED: %s\n" "== $name" "$(tail -2 <<<"$out" | tr '\n' ' ')"
    fi
}
peer() {
    [ -z "${PEER:-}" ] || printf "== peer %s\n  %s\n" "$*" "$(timeout 240 $PEER "$@" 2>/dev/null | tail -1)"
}
if [ "$device" = cuda ]; then
    b1="--preset llama-3.2-1b" b8="--preset llama-3.1-8b"
    ours "1b, 1 text" $b1 --tokens 256
    peer 1b --batch 1
    ours "1b, 32 texts" $b1 --batch 32 --tokens 256
    peer 1b --batch 32
    ours "8b, 1 text" $b8 --tokens 128
    peer 8b --batch 1
    for format in fp8 int8; do
        ours "1b, 1 text, $format weights" $b1 --tokens 256 --weights $format
        ours "1b, 32 texts, $format weights" $b1 --batch 32 --tokens 256 --weights $format
        ours "8b, 1 text, $format weights" $b8 --tokens 128 --weights $format
    done
    ours "1b, prompt of 4,096" $b1 --prompt 4096 --tokens 32
    ours "8b, prompt of 4,096" $b8 --prompt 4096 --tokens 32
    ours "1b, 32 texts, deterministic" $b1 --batch 32 --tokens 64 --set train.deterministic=true
else
    for preset in llama-15m llama-124m; do
        for batch in 1 8; do
            ours "$preset, $batch text(s)" --preset $preset --batch $batch --prompt 64 --tokens 48 --precision bf16
        done
    done
fi
