#!/usr/bin/env bash
# minislurm.sh - a real Slurm cluster of N virtual nodes on one machine, without systemd, cgroups or a DB.
#   minislurm.sh up|down|restart|status|env
# Env:  MS_DIR=/tmp/minislurm  MS_NODES=3  MS_CPUS=8  MS_MEM=6000  MS_GPUS=8  MS_MODE=netns|ports
#       MS_AUTH=munge|none   MS_SHM=2g
# needs: apt-get install -y --no-install-recommends slurm-wlm munge iproute2 ; root (netns mode)
set -euo pipefail
MS_DIR=${MS_DIR:-/tmp/minislurm}; MS_NODES=${MS_NODES:-3}; MS_CPUS=${MS_CPUS:-8}; MS_MEM=${MS_MEM:-6000}
MS_GPUS=${MS_GPUS:-8}; MS_MODE=${MS_MODE:-netns}; MS_AUTH=${MS_AUTH:-munge}
MS_SHM=${MS_SHM:-2g}; MS_NET=${MS_NET:-10.97.0}; MS_PFX=${MS_PFX:-node}; BR=${MS_BR:-msbr0}
D=$MS_DIR; CONF=$D/etc/slurm.conf; ME=$(id -un)
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$CONF
LIBD=$(ls -d /usr/lib/*/slurm-wlm 2>/dev/null | head -1)

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
stop_pidfile() { # file [signal]
  local f=$1 p; [ -s "$f" ] || return 0; p=$(cat "$f")
  if kill -0 "$p" 2>/dev/null; then kill "-${2:-TERM}" "$p" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$p" 2>/dev/null || break; sleep .1; done; kill -9 "$p" 2>/dev/null || true; fi
  rm -f "$f"; }

write_conf() {
  mkdir -p "$D"/{etc,state,log,run,bin,spool,node,shared}; chmod 755 "$D" "$D"/*
  local host ctladdr; host=$(hostname -s); ctladdr=127.0.0.1; [ "$MS_MODE" = netns ] && ctladdr=$MS_NET.254
  local auth
  if [ "$MS_AUTH" = munge ]; then auth="AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=5"
  else auth="AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5"; fi
  # records mail instead of sending it, so that --mail-type can be tested
  printf '#!/bin/sh\necho "$@" >> %s/log/mail.log\n' "$D" > "$D/bin/mail"; chmod 755 "$D/bin/mail"
  {
  cat <<C
ClusterName=mini
SlurmctldHost=$host($ctladdr)
SlurmUser=$ME
SlurmdUser=$ME
$auth
SlurmctldPort=${MS_CTLPORT:-6817}
SlurmdPort=6818
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
PluginDir=$LIBD
MailProg=$D/bin/mail
# no systemd / no cgroup control:
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SwitchType=switch/none
MpiDefault=none
# let the config win over the detected hardware (8 fake cpus on 2 real ones)
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000,batch_sched_delay=0
PriorityType=priority/basic
ReturnToService=2
JobRequeue=1
MinJobAge=3600
KillWait=5
InactiveLimit=0
OverTimeLimit=0
DefMemPerCPU=256
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=${MS_CTLPARAMS:-preempt_send_user_signal}
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.log
C
  echo "AccountingStorageType=accounting_storage/none"
  local i addr
  for i in $(seq "$MS_NODES"); do
    if [ "$MS_MODE" = netns ]; then addr="NodeAddr=$MS_NET.$i"; else addr="NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000+i))"; fi
    echo "NodeName=$MS_PFX$i $addr CPUs=$MS_CPUS RealMemory=$MS_MEM Gres=gpu:h100:$MS_GPUS Feature=fake,h100 State=UNKNOWN"
  done
  echo "PartitionName=debug Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF"
  echo "PartitionName=low   Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=${MS_GRACE:-15}"
  echo "PartitionName=high  Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF"
  } > "$CONF"
  if [ "$(id -u)" = 0 ] && [ "${MS_GPU_FILES:-1}" = 1 ]; then     # fake devices: clones of /dev/null
    for i in $(seq 0 $((MS_GPUS-1))); do [ -e /dev/fakegpu$i ] || { mknod /dev/fakegpu$i c 1 3; chmod 666 /dev/fakegpu$i; }; done
    echo "Name=gpu Type=h100 File=/dev/fakegpu[0-$((MS_GPUS-1))]" > "$D/etc/gres.conf"
  else echo "Name=gpu Type=h100 Count=$MS_GPUS" > "$D/etc/gres.conf"; fi
  # autodetect fails in a netns (`ip netns exec` gives a /sys without cgroup); v1 is only initialised when used. Slurm>=23.11: CgroupPlugin=disabled
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n' > "$D/etc/cgroup.conf"
  echo "export SLURM_CONF=$CONF" > "$D/env.sh"
}

start_munge() {
  [ "$MS_AUTH" = munge ] || return 0
  alive "$D/run/munged.pid" && return 0
  [ -s "$D/etc/munge.key" ] || { dd if=/dev/urandom of="$D/etc/munge.key" bs=128 count=1 status=none; chmod 600 "$D/etc/munge.key"; }
  rm -f "$D/run/munge.sock" "$D/run/munge.sock.lock"
  # --force: run as this user, with these directories, whatever their permissions
  munged --force --socket="$D/run/munge.sock" --key-file="$D/etc/munge.key" --pid-file="$D/run/munged.pid" \
         --seed-file="$D/etc/munge.seed" --log-file="$D/log/munged.log"
}

net_up() {
  [ "$MS_MODE" = netns ] || return 0
  ip link show $BR >/dev/null 2>&1 || { ip link add $BR type bridge; ip addr add $MS_NET.254/24 dev $BR; ip link set $BR up; }
  local i n
  for i in $(seq "$MS_NODES"); do n=$MS_PFX$i
    mkdir -p /etc/netns/$n       # `ip netns exec` bind-mounts these over /etc/*
    { echo "127.0.0.1 localhost"; echo "$MS_NET.254 $(hostname -s)"; for j in $(seq "$MS_NODES"); do echo "$MS_NET.$j $MS_PFX$j"; done; } > /etc/netns/$n/hosts
    ip netns list | grep -qw "$n" && continue
    ip netns add $n; ip link add msv$i type veth peer name eth0 netns $n
    ip link set msv$i master $BR up
    ip -n $n link set lo up; ip -n $n addr add $MS_NET.$i/24 dev eth0; ip -n $n link set eth0 up; ip -n $n route add default via $MS_NET.254
  done; }

start_slurmd() { # n
  local i=$1 n=$MS_PFX$1; alive "$D/run/init.$n.pid" && return 0
  mkdir -p "$D/spool/$n" "$D/node/$n/ray"
  if [ "$MS_MODE" = netns ]; then
    # a "node" = net + uts + mount + pid namespace; bash is its init (reaps orphans); kill it and all of the node dies
    nohup setsid ip netns exec $n unshare --uts --mount --pid --fork --kill-child --mount-proc bash -c "
      hostname $n; mkdir -p /tmp/ray
      mount --bind $D/node/$n/ray /tmp/ray                      # node-local Ray temp dir
      mount -t tmpfs -o size=$MS_SHM tmpfs /dev/shm             # node-local /dev/shm
      slurmd -D -N $n & wait \$!" >"$D/log/init.$n.log" 2>&1 < /dev/null &
    echo $! > "$D/run/init.$n.pid"
  else
    nohup setsid slurmd -D -N $n >"$D/log/init.$n.log" 2>&1 < /dev/null &
    echo $! > "$D/run/init.$n.pid"
  fi; }

up() {
  local t0=$(date +%s.%N); ulimit -n "$(ulimit -Hn)"; ulimit -c 0 || true
  write_conf; start_munge; net_up
  if ! alive "$D/run/slurmctld.pid"; then slurmctld ${MS_CLEAN:+-c}; fi
  for i in $(seq "$MS_NODES"); do start_slurmd $i; done
  for _ in $(seq 300); do
    [ "$(sinfo -h -p debug -t idle,mix,alloc -o '%D' 2>/dev/null | awk '{s+=$1} END{print s+0}')" = "$MS_NODES" ] && ok=1 && break; sleep .1; done
  [ "${ok:-}" = 1 ] || { echo "minislurm: nodes are not up" >&2; sinfo -N -l; tail -n 5 "$D"/log/*.log >&2; exit 1; }
  echo "minislurm up: $MS_NODES nodes ($MS_MODE, auth $MS_AUTH) in $(echo "$(date +%s.%N) - $t0" | bc 2>/dev/null || python3 -c "import time;print(round(time.time()-$t0,2))") s; source $D/env.sh"
}
down() {
  for f in "$D"/run/init.*.pid; do [ -e "$f" ] && { n=${f##*/init.}; n=${n%.pid}
      if [ "$MS_MODE" = netns ]; then stop_pidfile "$f" KILL; else stop_pidfile "$D/run/slurmd.$n.pid"; stop_pidfile "$f"; fi; }; done
  stop_pidfile "$D/run/slurmctld.pid"; stop_pidfile "$D/run/munged.pid"
  if [ "$MS_MODE" = netns ]; then
    for i in $(seq "$MS_NODES"); do ip netns del $MS_PFX$i 2>/dev/null || true; rm -rf /etc/netns/$MS_PFX$i; done
    ip link del $BR 2>/dev/null || true; fi
  rm -f "$D"/run/*.pid; echo "minislurm down"; }
case ${1:-} in up) up;; down) down;; restart) down; up;; status) sinfo -N -o '%N %t %C %m %G'; squeue;; env) cat "$D/env.sh";;
  *) sed -n 2,7p "$0"; exit 2;; esac
