#!/usr/bin/env bash
# The newest symbol of glibc that a binary asks for, and whether it trains in an older system.
# usage: bench/scripts/old-glibc.sh LOCKSTEP [ROOT] > bench/records/old-glibc.txt
#   LOCKSTEP  the binary of a wheel or archive that release.sh has made
#   ROOT      a folder with an older system, which root enters by chroot: debootstrap --variant=minbase bullseye ROOT
# Fails where a symbol is above GLIBC_2.28, and where the binary does not train, explain and find out about the machine there.
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/old-glibc.sh LOCKSTEP [ROOT]}")
root=${2:-}
echo "# bench/scripts/old-glibc.sh at ${COMMIT:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null)}"
"$lockstep" --version
newest=$(objdump -T "$lockstep" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
echo "newest symbol: $newest"
[ "$(printf '%s\nGLIBC_2.28\n' "$newest" | sort -V | tail -1)" = GLIBC_2.28 ]
objdump -p "$lockstep" | sed -n 's/^ *NEEDED */needs /p'
[ -n "$root" ] || exit 0
sed -n 's/^PRETTY_NAME=//p' "$root/etc/os-release"
chroot "$root" /bin/sh -c 'ldd --version 2>&1 | head -1'
work=$root/lockstep-$$
mkdir "$work"
trap 'rm -rf "$work"' EXIT
cp "$lockstep" "$work/lockstep"
mkdir "$work/text"
for i in $(seq 400); do echo "line $i: the square of $((i % 97)) is $((i % 97 * (i % 97)))"; done >"$work/text/a.txt"
cat >"$work/run.toml" <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 2
ffn = 128
[data]
paths = ["text"]
[train]
steps = 20
seq = 64
global_batch = 8
device = "cpu"
TOML
inside() { chroot "$root" /bin/sh -c "cd /$(basename "$work") && mount -t proc proc /proc 2>/dev/null; $*"; }
trap 'umount "$root/proc" 2>/dev/null || true; rm -rf "$work"' EXIT
inside "./lockstep doctor" | head -3
inside "./lockstep explain run.toml" | head -2
inside "./lockstep train run.toml --quiet --run-dir run" | tail -1
inside "./lockstep generate run --prompt line --max-tokens 8 2>/dev/null"
