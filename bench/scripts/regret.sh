#!/bin/sh
# Layouts that the search proposes for every (model, GPUs) of the published sweep, beside what was measured there.
# Usage: bench/scripts/regret.sh [LOCKSTEP] > bench/records/regret.txt
set -eu
lockstep=${1:-target/release/lockstep}
cd "$(dirname "$0")/../records/published"
case $lockstep in /*) ;; *) lockstep=../../../$lockstep ;; esac
echo '$ lockstep validate nanotron_ok.csv --search'
"$lockstep" validate nanotron_ok.csv --search 2> /dev/null
