#!/usr/bin/env bash
# A real Slurm of virtual nodes on this machine, for tests: no systemd, no cgroups, root or not.
#   slurm-cluster.sh up FOLDER NODES CPUS PORT     starts it; FOLDER/slurm.conf is what SLURM_CONF must name
#   slurm-cluster.sh down FOLDER                   stops it
# Debian's packages: slurmctld slurmd slurm-client munge. The port, and one more after it for each node, must be free.
set -euo pipefail
what=$1 folder=$2

if [ "$what" = down ]; then
    # Read first: a daemon that ends removes its file.
    pids=$(cat "$folder"/*.pid 2>/dev/null) || true
    if [ -S "$folder/munge.socket" ]; then
        SLURM_CONF=$folder/slurm.conf timeout 10 scontrol shutdown >/dev/null 2>&1 || true
    fi
    # Gone when this ends: whoever starts the next one must not find them. Nobody may be there to reap them.
    for signal in TERM KILL; do
        kill -"$signal" $pids 2>/dev/null || true
        for _ in $(seq 50); do
            left=
            for pid in $pids; do
                if grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$pid/status"; then left=1; fi
            done
            if [ -z "$left" ]; then exit 0; fi
            sleep 0.1
        done
    done
    exit 0
fi

nodes=$3 cpus=$4 port=$5
user=$(id -un) host=$(hostname -s)
mkdir -p "$folder"/{state,log} && chmod 755 "$folder"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$folder/cgroup.conf"
cat >"$folder/slurm.conf" <<CONF
ClusterName=lockstep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# How long a requeued job waits.
AuthInfo=socket=$folder/munge.socket,cred_expire=3
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
# Nodes have the cores that this file says.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
# A node that is lost is noticed after this many seconds.
SlurmdTimeout=10
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
# Started as what has no terminal and no open pipe of ours: they stay when this script ends.
{
    munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munge.pid" \
        --log-file="$folder/log/munge.log" --seed-file="$folder/munge.seed"
    slurmctld -c -f "$SLURM_CONF"
    for i in $(seq "$nodes"); do slurmd -N "n$i" -f "$SLURM_CONF"; done
} </dev/null >"$folder/log/start.log" 2>&1
for _ in $(seq 40); do
    if timeout 5 srun -Q -N "$nodes" true >/dev/null 2>&1; then exit 0; fi
    sleep 0.25
done
echo "Slurm does not come up:" >&2
cat "$folder"/log/*.log >&2
exit 1
