#!/bin/bash
# How many files it takes to extend Lockstep: applies each patch of bench/extend to a copy of HEAD alone, checks the workspace, runs the
# tests that the patch names, and counts its files below crates/ and docs/ against its limit.
# bench/scripts/extend.sh [ROW…]   (ROW: a patch's name, such as schedule; all without one)
# A patch begins with lines `# what:`, `# limit:` and `# tests:` (commands, by semicolons). Ends with an error if a row fails.
set -euo pipefail
root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Rows have the dependencies in common.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$work/target}"
log="$work/log"
git clone -q "$root" "$work/tree"
rows=("$@")
[ ${#rows[@]} -gt 0 ] || for patch in "$root"/bench/extend/*.patch; do rows+=("$(basename "$patch" .patch)"); done

# A line of the head of a patch.
head_of() { sed -n "1,/^diff /s/^# $1: //p" "$patch"; }

# Runs a command in the tree; where it fails, says so and shows the end of its output.
step() {
    echo "  $row: $*" >&2
    (cd "$work/tree" && eval "$*") > "$log" 2>&1 && return
    tail -n 30 "$log" >&2
    return 1
}

# What a row comes to: "ok", or what failed.
judge() {
    step cargo check --workspace --all-targets || { echo "does not compile"; return; }
    local test tests
    IFS=';' read -ra tests <<< "$(head_of tests)"
    for test in "${tests[@]}"; do
        test="${test# }"
        step "$test" || { echo "failed: $test"; return; }
        grep -q 'test result: ok\. [1-9]' "$log" || { echo "ran no test: $test"; return; }
    done
    [ "$files" -le "$limit" ] && echo ok || echo "over its limit"
}

bad=0
table=$(printf '%-26s %5s %5s  %s' row files limit result)
for row in "${rows[@]}"; do
    patch="$root/bench/extend/$row.patch"
    [ -f "$patch" ] || { echo "no such row: $row" >&2; exit 2; }
    # Files that no patch touches keep their times, so cargo builds no more than what changes.
    git -C "$work/tree" reset -q --hard
    limit=$(head_of limit)
    if git -C "$work/tree" apply --index "$patch"; then
        files=$(git -C "$work/tree" diff --cached --name-only -- crates docs | wc -l)
        result=$(judge)
    else
        files=- result="does not apply"
    fi
    [ "$result" = ok ] || bad=1
    line=$(printf '%-26s %5s %5s  %s' "$row" "$files" "$limit" "$result")
    echo "$line" >&2
    table+=$'\n'"$line"
done
echo "$table"
exit $bad
