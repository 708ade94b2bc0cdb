#!/usr/bin/env bash
# Runs over hosts whose network fails: network namespaces of this machine with a switch between them. Takes root.
# bench/scripts/hosts.sh LOCKSTEP [ROUNDS] [SEED]
# Every case ends in bounded time with a cause that names a rank on every side, or goes on, and no loss has another bit than in a run that nobody
# disturbed. Fails where that is not so. A case that lies in the moment is repeated ROUNDS times.
relay=$(realpath "$(dirname "$0")/relay.py") late=$(realpath "$(dirname "$0")/late_files.py")
source "$(dirname "$0")/killing.sh"
rounds=${2:-4}
RANDOM=${3:-1}
name=ls$$-
hosts=0 relaying=
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! ip netns add "${name}try" 2>/dev/null; then
    echo "skipped: hosts as network namespaces take root and iproute2" && exit 0
fi
ip netns del "${name}try"
# What all ranks of a job know.
export LOCKSTEP_JOB_SECRET=5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e
cat >run.toml <<'TOML'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 4
kv_heads = 4
ffn = 96
[data]
paths = ["corpus"]
[train]
steps = 200
seq = 32
global_batch = 12
micro_batch = 1
threads = 1
device = "cpu"
reproducible = true
validate_every = 0
[checkpoint]
every = 50
[cluster]
snapshot_every = 2
TOML

# --- hosts ---------------------------------------------------------------------------------------------------------------------------------

clear_hosts() {
    if [ -n "$relaying" ]; then kill "$relaying" 2>/dev/null && wait "$relaying" 2>/dev/null || true; fi
    relaying=
    for space in $(ip netns list | cut -d' ' -f1 | grep "^$name" || true); do ip netns del "$space"; done
}
trap 'kill $(jobs -p) 2>/dev/null || true; clear_hosts; unmount; rm -rf "$work"' EXIT
switch() { ip -n "${name}switch" "$@"; }
on_host() { ip -n "$name$1" "${@:2}"; }

# network N: N hosts at a switch that has two halves, and all are at the first.
network() {
    clear_hosts
    hosts=$1
    ip netns add "${name}switch"
    for half in one other; do switch link add $half type bridge && switch link set $half up; done
    for host in $(seq 0 $((hosts - 1))); do
        ip netns add "$name$host"
        on_host "$host" link set lo up
        on_host "$host" link add link0 type veth peer name "port$host" netns "${name}switch"
        on_host "$host" addr add "10.213.77.$((host + 1))/24" dev link0
        on_host "$host" link set link0 up
        switch link set "port$host" master one up
    done
}
# late_network N MS PERCENT: the same over a relay that is late by MS, and loses PERCENT of all frames.
late_network() {
    clear_hosts
    hosts=$1
    local spaces=()
    for host in $(seq 0 $((hosts - 1))); do ip netns add "$name$host" && spaces+=("$name$host"); done
    python3 "$relay" "$2" "$3" "${spaces[@]}" >relay.out 2>&1 &
    relaying=$!
    until grep -q ready relay.out; do kill -0 $relaying || { cat relay.out && exit 1; } && sleep 0.05; done
    for host in $(seq 0 $((hosts - 1))); do
        on_host "$host" link set lo up
        on_host "$host" addr add "10.213.77.$((host + 1))/24" dev tap0
        on_host "$host" link set tap0 up
    done
}
unplug() { switch link set "port$1" down; }
plug() { switch link set "port$1" up; }
# Nothing goes between these hosts and the others any more, and nobody is told.
part() { for host in "$@"; do switch link set "port$host" master other; done; }
heal() { for host in $(seq 0 $((hosts - 1))); do switch link set "port$host" master one up; done; }
# Two hosts do not reach each other, and both reach all others.
estrange() {
    on_host "$1" route add blackhole "10.213.77.$(($2 + 1))/32"
    on_host "$2" route add blackhole "10.213.77.$(($1 + 1))/32"
}
# late_files SECONDS: each host sees the folder `shared` by a mount of its own, which shows what others do that much later.
late_files() {
    unmount
    mkdir -p shared
    for host in $(seq 0 $((hosts - 1))); do
        mkdir -p "view$host"
        python3 "$late" shared "view$host" "$1" >"view$host.log" 2>&1 &
        disown
        until mountpoint -q "view$host"; do kill -0 $! || { cat "view$host.log" && exit 1; } && sleep 0.05; done
    done
}
unmount() { for view in view*; do if mountpoint -q "$view"; then umount --lazy "$view"; fi; done; }
there() {
    exec ip netns exec "$name$1" unshare --uts --mount sh -c \
        'hostname "$0" && if mountpoint -q "$1"; then mount --bind "$1" shared; fi && shift && exec "$@"' "host$1" "view$1" "${@:2}"
}

# --- runs ----------------------------------------------------------------------------------------------------------------------------------

# start RUN RANKS KEY=VALUE...: the ranks of a run, spread over the hosts in their order.
start() {
    run=$1 ranks=$2 pids=() set=()
    for key in "${@:3}"; do set+=(--set "$key"); done
    for rank in $(seq 0 $((ranks - 1))); do start_rank "$rank"; done
}
# start_rank RANK [VARIABLE=VALUE]: one of them.
start_rank() {
    RANK=$1 WORLD_SIZE=$ranks LOCAL_RANK=0 MASTER_ADDR=10.213.77.1 MASTER_PORT=29500 there $(($1 * hosts / ranks)) \
        env ${preload[$1]:+LD_PRELOAD="${preload[$1]}"} "${@:2}" "$lockstep" train run.toml --quiet --run-dir "$run" "${set[@]}" \
        >>"$run.$1.out" 2>>"$run.$1.err" &
    pids[$1]=$!
}
declare -A preload=()
fail() {
    echo "$case: $*"
    for rank in $(seq 0 $((ranks - 1))); do echo "--- rank $rank" && tail -5 "$run.$rank.err"; done
    tail -3 "$run/events.jsonl"
    exit 1
}
steps() { if [ -f "$1/metrics.jsonl" ]; then wc -l <"$1/metrics.jsonl"; else echo 0; fi; }
comes_to() {
    for _ in $(seq 3000); do
        if [ "$(steps "$run")" -ge "$1" ]; then return; fi
        kill -0 "${pids[0]}" 2>/dev/null || fail "ended before step $1"
        sleep 0.02
    done
    fail "did not come to step $1"
}
a_moment() { sleep "$((RANDOM % ${1:-2})).$(printf %03d $((RANDOM % 1000)))"; }
# ends RANK CODE SECONDS: the process of a rank ends so, within this time.
ends() {
    timeout "$3" tail --pid="${pids[$1]}" -f /dev/null || fail "rank $1 is still there after $3 s"
    local code=0
    wait "${pids[$1]}" || code=$?
    [ "$code" = "$2" ] || fail "rank $1 ended with exit code $code, not $2"
}
# Every rank of these has ended with an error that names another rank, and gives a hint.
ends_named() {
    for rank in "${@:2}"; do
        ends "$rank" 1 "$1"
        grep -q '^error: ' "$run.$rank.err" && grep -q 'rank' "$run.$rank.err" || fail "rank $rank names nobody"
        grep -q '^hint: ' "$run.$rank.err" || fail "rank $rank gives no hint"
    done
}
# A rank without which the others have gone on says so, and why.
left_out() { grep -q 'is gone: .*; the others go on without this process' "$run.$1.err" || fail "rank $1 does not say that it is left out"; }
# The losses are those of a run that nobody disturbed, and every step was written once and in order: by one writer at a time.
same_bits() {
    bits "$1" >"$1.bits"
    cmp -s "$1.bits" "${2:-whole}.bits" || { diff "$1.bits" "${2:-whole}.bits" | head -4 && fail "other bits"; }
}
goes_on() {
    heal
    start "$run" "$ranks" "$@"
    for rank in $(seq 0 $((ranks - 1))); do ends "$rank" 0 900; done
    same_bits "$run"
}
worlds() { grep -c '"world"' "$run/events.jsonl" || true; }
awaits_worlds() {
    for _ in $(seq 3000); do
        if [ "$(worlds)" -ge "$1" ]; then return; fi
        kill -0 "${pids[$2]}" 2>/dev/null || fail "ended before world $1"
        sleep 0.02
    done
    fail "world $1 did not come"
}
history() {
    python3 - "$run/events.jsonl" <<'PY'
import json, sys
worlds = [json.loads(line) for line in open(sys.argv[1]) if '"world"' in line]
print("; ".join(f"world {w['epoch']} of {w['ranks']} after {w['recovery_s']:.1f} s, {w['lost_steps']} steps done again" for w in worlds))
PY
}
begins() { case=$1 && since=$(date +%s%N); }
done_with() { echo "$case: $* ($((($(date +%s%N) - since) / 1000000000)) s)"; }

"$lockstep" train run.toml --quiet --run-dir whole >/dev/null
bits whole >whole.bits

begins "a link down for 5 s"
network 2
start down5 4 parallel.dp=2 parallel.pp=2
comes_to $((RANDOM % 20 + 3))
unplug 1 && sleep 5 && plug 1
for rank in 0 1 2 3; do ends $rank 0 900; done
same_bits down5
! grep -q 'is gone' down5.*.err || fail "somebody was taken for gone"
done_with "the run goes on, nothing is lost"

begins "a link down for 5 s, elastic"
network 2
start down5e 2 parallel.dp=2 cluster.elastic=1..2
comes_to $((RANDOM % 20 + 3))
unplug 1 && sleep 5 && plug 1
for rank in 0 1; do ends $rank 0 900; done
same_bits down5e
done_with "the run goes on in $(worlds) new worlds"

begins "a link down for good"
network 2
start down 4 parallel.dp=2 parallel.pp=2
comes_to 5
unplug 1
ends_named 60 0 1 2 3
cause=$(grep -o 'rank . on host host. is gone: [^;]*' down.0.err | head -1)
goes_on parallel.dp=2 parallel.pp=2
done_with "all four end ($cause), and the same command goes on"

begins "a partition in a step"
waited=
for round in $(seq "$rounds"); do
    network 2
    start "step$round" 4 parallel.dp=4 parallel.zero=3
    comes_to 2 && a_moment 1
    part 1
    ends_named 60 0 1 2 3
    for rank in 0 1 2 3; do waited+="$(grep -o "rank $rank waited in [a-z_]*" "step$round.$rank.err" | head -1 | cut -d' ' -f5) "; done
    goes_on parallel.dp=4 parallel.zero=3
done
done_with "$rounds times: all end, and the same command goes on; ranks waited in $(tr ' ' '\n' <<<"$waited" | sort | uniq -c | grep -v '^ *[0-9]* *$' | awk '{printf "%s%s (%s)", sep, $2, $1; sep=", "}')"

begins "a partition before ranks have met"
network 2
part 1
start never 2 parallel.dp=2 parallel.timeout=6
ends_named 60 0 1
done_with "$(grep -h '^error' never.0.err never.1.err | sed 's/^error: //' | paste -sd'|' | sed 's/|/; /')"

begins "a partition while ranks meet"
before=0 after=0
for round in $(seq "$rounds"); do
    network 4
    start "meet$round" 4 parallel.dp=4 parallel.timeout=8
    sleep "0.$(printf %03d $((RANDOM % 300)))"
    part 2 3
    ends_named 60 0 1 2 3
    if [ "$(steps "meet$round")" = 0 ]; then before=$((before + 1)); else after=$((after + 1)); fi
    goes_on parallel.dp=4
done
done_with "all end, $before times before the first step and $after times after it, and the same command goes on"

begins "a partition during a save"
saves=0
for round in $(seq "$rounds"); do
    network 2
    start "save$round" 4 parallel.dp=4 parallel.zero=3 checkpoint.every=1
    comes_to 2 && a_moment 1
    for _ in $(seq 2000); do if compgen -G "save$round/checkpoints/.tmp-*" >/dev/null; then break; fi; done
    part 1
    ends_named 60 0 1 2 3
    if grep -q 'in save' save"$round".*.err; then saves=$((saves + 1)); fi
    for whole in "save$round"/checkpoints/step-*; do "$lockstep" checkpoint verify "$whole" >/dev/null || fail "$whole is damaged"; done
    goes_on parallel.dp=4 parallel.zero=3
done
done_with "$rounds times: all end, $saves times with a rank in the save; no checkpoint is damaged, and the same command goes on"

begins "20 ms later, 1 of 100 frames lost"
late_network 2 20 1
start late 2 parallel.dp=2 parallel.zero=1 train.steps=30
for rank in 0 1; do ends $rank 0 900; done
"$lockstep" train run.toml --quiet --run-dir whole30 --set train.steps=30 >/dev/null && bits whole30 >whole30.bits
same_bits late whole30
done_with "30 steps, the same bits"

begins "a link of 4 Mbit/s"
network 2
on_host 0 link show link0 >/dev/null && tc -n "${name}0" qdisc add dev link0 root tbf rate 4mbit burst 16kb latency 400ms
start slow 2 parallel.dp=2 parallel.zero=1 train.steps=30
for rank in 0 1; do ends $rank 0 900; done
same_bits slow whole30
done_with "30 steps, the same bits"

for alone in 0 1 2; do
    begins "elastic, host $alone of three alone"
    network 3
    start "alone$alone" 3 parallel.dp=3 cluster.elastic=1..3
    comes_to 4 && a_moment 1
    part $alone
    for rank in 0 1 2; do ends $rank 0 900; done
    left_out $alone
    same_bits "alone$alone"
    done_with "it waits, the others go on: $(history)"
done

begins "elastic, two halves"
network 4
start halves 4 parallel.dp=4 parallel.zero=1 cluster.elastic=1..4
comes_to 4
part 2 3
ends_named 60 0 1 2 3
[ "$(worlds)" = 0 ] || fail "one of them went on"
goes_on parallel.dp=4 parallel.zero=1 cluster.elastic=1..4
done_with "both end, and the same command goes on"

begins "elastic, a partition after a loss, while the others meet again"
for round in $(seq "$rounds"); do
    network 4
    start "again$round" 4 parallel.dp=4 parallel.zero=1 cluster.elastic=1..4
    comes_to 4 && a_moment 1
    kill -9 "${pids[3]}" && wait "${pids[3]}" 2>/dev/null || true
    sleep "0.$(printf %03d $((RANDOM % 500)))"
    part 2
    for rank in 0 1 2; do
        code=0 && timeout 900 tail --pid="${pids[$rank]}" -f /dev/null && wait "${pids[$rank]}" || code=$?
        codes[rank]=$code
    done
    # Of four, two are no majority; of three that have met after the loss, they are.
    case ${codes[0]}${codes[1]}${codes[2]} in
        000) went_on=$((${went_on:-0} + 1)) && same_bits "again$round" ;;
        111) ended=$((${ended:-0} + 1)) && grep -q 'which is not more than half' "again$round.0.err" || fail "another cause" ;;
        *) fail "exit codes ${codes[*]}" ;;
    esac
done
done_with "of $rounds runs ${went_on:-0} go on with two of three, ${ended:-0} end with two of four"

begins "elastic, a partition during a save"
for round in $(seq "$rounds"); do
    network 3
    start "esave$round" 3 parallel.dp=3 parallel.zero=1 checkpoint.every=1 cluster.elastic=1..3
    comes_to 2 && a_moment 1
    for _ in $(seq 2000); do if compgen -G "esave$round/checkpoints/.tmp-*" >/dev/null; then break; fi; done
    part $((round % 3))
    for rank in 0 1 2; do ends $rank 0 900; done
    left_out $((round % 3))
    for whole in "esave$round"/checkpoints/step-*; do "$lockstep" checkpoint verify "$whole" >/dev/null || fail "$whole is damaged"; done
    same_bits "esave$round"
done
done_with "$rounds times: two of three go on, no checkpoint is damaged"

begins "elastic, two hosts that do not reach each other"
network 3
start strange 3 parallel.dp=3 cluster.elastic=1..3 train.steps=600
comes_to 4
estrange 1 2
"$lockstep" train run.toml --quiet --run-dir whole600 --set train.steps=600 >/dev/null && bits whole600 >whole600.bits
for rank in 0 1 2; do ends $rank 0 900; done
same_bits strange whole600
done_with "the third waits until the run has ended: $(history)"

begins "elastic, a host that comes back"
"$lockstep" train run.toml --quiet --run-dir whole4000 --set train.steps=4000 >/dev/null && bits whole4000 >whole4000.bits
network 3
# Steps take milliseconds on an idle machine, and the host is away for seconds.
start back 3 parallel.dp=3 cluster.elastic=1..3 train.steps=4000
comes_to 4
part 2
awaits_worlds 1 0
heal
awaits_worlds 2 0
for rank in 0 1 2; do ends $rank 0 900; done
same_bits back whole4000
done_with "$(history)"

begins "elastic, hosts are killed and come back"
network 3
start hostkills 6 parallel.dp=6 parallel.zero=1 cluster.elastic=1..6 train.steps=600 cluster.snapshot_every=5
comes_to 4
killed=0
while [ "$killed" -lt $((rounds * 5)) ] && [ "$(steps "$run")" -lt 500 ]; do
    host=$((RANDOM % 3)) before=$(worlds)
    a_moment 2
    kill -9 "${pids[$((2 * host))]}" "${pids[$((2 * host + 1))]}" 2>/dev/null || true
    wait "${pids[$((2 * host))]}" "${pids[$((2 * host + 1))]}" 2>/dev/null || true
    killed=$((killed + 1))
    # The others go on, or have met with its next processes already.
    for _ in $(seq 600); do if [ "$(worlds)" -gt "$before" ]; then break; fi && sleep 0.05; done
    [ "$(worlds)" -gt "$before" ] || fail "the others do not go on"
    before=$(worlds)
    for rank in $((2 * host)) $((2 * host + 1)); do start_rank $rank LOCKSTEP_JOINS_LATE=1; done
    for _ in $(seq 600); do if [ "$(worlds)" -gt "$before" ]; then break; fi && sleep 0.05; done
done
for rank in 0 1 2 3 4 5; do ends $rank 0 900; done
same_bits hostkills whole600
done_with "$killed hosts of 2 ranks each are killed: $(worlds) worlds"

begins "elastic, a host whose clock is an hour ahead"
if cc -shared -fPIC -o clock.so -xc - 2>cc.err <<'C'
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return result;
}
time_t time(time_t *now) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}
C
then
    network 3
    preload[1]=$work/clock.so
    start clock 3 parallel.dp=3 cluster.elastic=1..3
    for rank in 0 1 2; do ends $rank 1 60; done
    for rank in 0 1 2; do grep -q 'the clock of rank 1 on host host1 differs from that of rank 0 on host host0 by +3600 s' "clock.$rank.err" || fail "rank $rank names no clock"; done
    [ "$(steps clock)" = 0 ] || fail "it trained"
    # In a run that goes on, the host does not join.
    preload=()
    start joins 3 parallel.dp=3 cluster.elastic=1..3
    comes_to 4
    kill -9 "${pids[1]}"
    before=$(steps joins) && comes_to $((before + 2))
    preload[1]=$work/clock.so
    start_rank 1 LOCKSTEP_JOINS_LATE=1
    ends 1 1 60
    preload=()
    grep -q 'the clock of this host differs from the run.s by +3600 s: it cannot join' joins.1.err || fail "it is not refused by its clock"
    for rank in 0 2; do ends $rank 0 900; done
    same_bits joins
    done_with "it is refused at the start and when it joins; the others go on: $(history)"
else
    echo "$case: skipped, there is no C compiler"
fi
if [ -w /dev/fuse ] && python3 -c 'import fuse' 2>/dev/null; then
    begins "files of other hosts are seen 3 s later"
    network 2 && late_files 3
    start shared/late 4 parallel.dp=4 parallel.zero=1 checkpoint.every=20
    for rank in 0 1 2 3; do ends $rank 0 900; done
    same_bits shared/late
    for whole in shared/late/checkpoints/step-*; do "$lockstep" checkpoint verify "$whole" >/dev/null || fail "$whole is damaged"; done
    done_with "the run ends well, with $(ls -d shared/late/checkpoints/step-* | wc -l) checkpoints"

    begins "files of other hosts are seen 3 s later, and all ranks are killed"
    start shared/killed 4 parallel.dp=4 parallel.zero=3 checkpoint.every=10
    comes_to 25
    kill -9 "${pids[@]}" && wait "${pids[@]}" 2>/dev/null || true
    goes_on parallel.dp=4 parallel.zero=3 checkpoint.every=10
    done_with "the same command goes on at once"

    network 3 && late_files 3
    for alone in 0 2; do
        begins "files of other hosts are seen 3 s later, elastic, rank $alone is killed"
        start "shared/lost$alone" 3 parallel.dp=3 cluster.elastic=1..3
        comes_to 4 && a_moment 1
        kill -9 "${pids[$alone]}" && wait "${pids[$alone]}" 2>/dev/null || true
        for rank in 0 1 2; do if [ $rank != $alone ]; then ends $rank 0 900; fi; done
        same_bits "shared/lost$alone"
        done_with "the others go on: $(history)"
    done

    begins "files of other hosts are seen 3 s later, elastic, host 0 of three alone"
    start shared/alone 3 parallel.dp=3 cluster.elastic=1..3
    comes_to 4 && a_moment 1
    part 0
    for rank in 0 1 2; do ends $rank 0 900; done
    left_out 0
    same_bits shared/alone
    done_with "it waits, the others go on: $(history)"
else
    echo "files of other hosts are seen later: skipped, this takes /dev/fuse, libfuse 2 and Python's fusepy"
fi
echo "no loss has another bit"
