#!/usr/bin/env bash
# Builds the CPU kernels for aarch64 and runs a subset of conformance, on an aarch64 machine or in an emulator (qemu-user).
# usage: bench/scripts/aarch64.sh [PART...] > bench/records/aarch64.txt
#   PART       kernels (tests of the CPU kernels and of their vector paths), ops (every op against the f64 reference); both where none is named
#   BUILD_STD  1 builds the standard library from its source (rustup component rust-src), where the target is not installed
# On another machine it needs, as Debian names the packages, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user, and
# `rustup target add aarch64-unknown-linux-gnu`. Builds are below target/aarch64.
#
# Both are run on the paths neon and portable. Fails where a test fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
parts=("$@")
[ $# -gt 0 ] || parts=(kernels ops)
target=aarch64-unknown-linux-gnu
export CARGO_TARGET_DIR=$PWD/target/aarch64
options=(--quiet --target "$target")
runner=()
say() { echo "aarch64.sh: $*" >&2; }
filters=()
for part in "${parts[@]}"; do
    case $part in
        kernels) filters+=("--lib cpu::") ;;
        ops) filters+=("--test conformance") ;;
        *) say "$part is no part: kernels or ops" && exit 1 ;;
    esac
done
if [ "$(uname -m)" != aarch64 ]; then
    for program in aarch64-linux-gnu-gcc qemu-aarch64; do
        if ! command -v "$program" >/dev/null; then
            say "no $program: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
            exit 1
        fi
    done
    runner=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="${runner[*]}"
fi
installed=$(rustc --print sysroot)/lib/rustlib
if [ "${BUILD_STD:-}" = 1 ]; then
    if [ ! -d "$installed/src/rust/library/std" ]; then
        say "no source of the standard library: rustup component add rust-src"
        exit 1
    fi
    # -Zbuild-std is unstable; Lockstep itself uses stable Rust only.
    export RUSTC_BOOTSTRAP=1
    options+=(-Zbuild-std)
elif [ ! -d "$installed/$target/lib" ]; then
    say "no standard library for $target: rustup target add $target, or BUILD_STD=1 to build it"
    exit 1
fi

echo "# bench/scripts/aarch64.sh ${parts[*]} at ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}"
echo "$(rustc --version), on $(uname -m)${runner:+, in $("${runner[0]}" --version | head -1)}"
# One package: cargo then builds few dependencies.
tests=(cargo test "${options[@]}" -p lockstep-exec)
"${tests[@]}" --no-run --lib --test conformance >&2

# Prints how many tests ran; all that they say goes to stderr where one fails.
run_tests() {
    local name=$1 log start=$SECONDS
    shift
    log=$(mktemp)
    if ! "${tests[@]}" "$@" >"$log" 2>&1; then
        cat "$log" >&2
        say "$name: failed"
        exit 1
    fi
    awk -v name="$name" -v seconds=$((SECONDS - start)) \
        '/^test result: ok/ { n += $4 } END { printf "%s: %d passed in %d s\n", name, n, seconds; exit n == 0 }' "$log"
    rm "$log"
}
for path in neon portable; do
    export LOCKSTEP_CPU=$path
    for i in "${!parts[@]}"; do
        # shellcheck disable=SC2086 # words of their own
        run_tests "$path: ${parts[$i]}" ${filters[$i]}
    done
done
