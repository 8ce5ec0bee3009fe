#!/usr/bin/env bash
# A throw-away Slurm cluster on one host, loopback only, everything below $LAB.
# Nothing is written to /etc/slurm, /etc/munge, /run or /var (only, where it may, one line in /etc/hosts).
#
#   apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge
#   apt-get install -y --no-install-recommends slurmdbd mariadb-server     # only for ACCT=1
#
#   ./start-slurm.sh start        # or: NODES=4 ACCT=1 ./start-slurm.sh start
#   source "$LAB/env.sh" && sinfo
#   ./start-slurm.sh undelay      # let requeued jobs restart now instead of after 120 s
#   ./start-slurm.sh fail n2      # a node dies: its daemon and everything it runs, without a word
#   ./start-slurm.sh mend n2      # and comes back
#   ./start-slurm.sh status | stop | wipe
#
# ACCT=0  no accounting; a small `sacct` stand-in (first on PATH after sourcing env.sh) answers from
#         `squeue --states=all` the call that submitit makes and the one that sweeps makes
# ACCT=1  real sacct (mariadbd + slurmdbd)
# Knobs: NODES CPUS MEM GPUS (per node) ACCT PORT LAB GRACE KILL_WAIT ETC_HOSTS OOM_KILL MIN_JOB_AGE
set -euo pipefail

LAB=${LAB:-${TMPDIR:-/tmp}/slurm-lab}
NODES=${NODES:-2} CPUS=${CPUS:-4} MEM=${MEM:-8000} GPUS=${GPUS:-2} ACCT=${ACCT:-0}
PORT=${PORT:-16810}            # ctld PORT+0, dbd PORT+1, node k PORT+1+k
GRACE=${GRACE:-30} KILL_WAIT=${KILL_WAIT:-5}   # seconds: of a pre-empted job, and between TERM and KILL
MIN_JOB_AGE=${MIN_JOB_AGE:-86400}  # seconds that squeue remembers an ended job (ACCT=0 has nothing else)
OOM_KILL=${OOM_KILL:-0}        # 1: end a step that outgrows --mem (polled every second; there is no cgroup)
ETC_HOSTS=${ETC_HOSTS:-1}      # as root: make n1..nN resolve (torch.distributed MASTER_ADDR)
ME=$(id -un) HOST=$(hostname)
export SLURM_CONF=$LAB/etc/slurm.conf MYSQL_UNIX_PORT=$LAB/run/mysql.sock
PATH=/usr/sbin:/sbin:$PATH

say() { printf '%s\n' "$*" >&2; }
alive() { # alive PID: running and not a zombie (nobody may reap our orphans in a container)
  local s; s=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1) || return 1
  [[ -n $s && $s != Z && $s != X ]]
}
spawn() { # spawn NAME CMD...: own session, log file, pid file
  local name=$1; shift
  setsid "$@" >"$LAB/log/$name.out" 2>&1 </dev/null &
  echo $! >"$LAB/run/$name.pid"
}
wait_for() { # wait_for SECONDS WHAT CMD...
  local end=$((SECONDS + $1)) what=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS >= end)); then say "gave up waiting for $what; see $LAB/log"; return 1; fi
    sleep 0.1
  done
}
port_open() { (exec 3<>"/dev/tcp/$ADDR/$1") 2>/dev/null; }
all_idle() { [[ $(sinfo -h -N -p low -o '%T' | grep -cE '^(idle|mixed|allocated)$') == "$NODES" ]]; }
munge_ok() { munge -n -S "$LAB/munge/socket" | unmunge -S "$LAB/munge/socket"; }
db() { mariadb-admin --no-defaults --socket="$LAB/run/mysql.sock" "$@"; }

pick_addr() {
  # With No*InAddrAny daemons and srun bind to whatever this host's own name resolves to, and steps
  # call back on 127.0.0.1: so only that address will do (Debian's 127.0.1.1 hangs every srun).
  local ip; ip=$(getent ahostsv4 "$HOST" | awk 'NR==1{print $1}') || true
  ADDR=127.0.0.1 COMM=CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
  if [[ $ip != 127.0.0.1 ]]; then
    COMM=""; say "host name $HOST resolves to '${ip:-nothing}', not to 127.0.0.1: listening on 0.0.0.0"
  fi
}

write_conf() {
  cat >"$LAB/etc/slurm.conf" <<E
ClusterName=lab
SlurmctldHost=localhost($ADDR)
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/socket
$COMM
SlurmctldPort=$PORT
SlurmctldPidFile=$LAB/run/slurmctld.own.pid
SlurmdPidFile=$LAB/run/slurmd.%n.own.pid
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
# no cgroup: processes are followed by parent pid, nothing is confined
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
MailProg=/bin/true
# more CPUs, memory and nodes than the host has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=200
ReturnToService=2
MinJobAge=$MIN_JOB_AGE
MaxJobCount=20000
MaxArraySize=10001
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
KillWait=$KILL_WAIT
# preemption: jobs in "high" requeue jobs in "low", which first get their --signal (submitit: USR2)
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobCompType=jobcomp/none
E
  if [[ $ACCT == 1 ]]; then cat >>"$LAB/etc/slurm.conf" <<E
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$ADDR
AccountingStoragePort=$((PORT + 1))
AccountingStoragePass=$LAB/munge/socket
E
  else echo "AccountingStorageType=accounting_storage/none" >>"$LAB/etc/slurm.conf"; fi
  if [[ $OOM_KILL == 1 ]]; then printf 'JobAcctGatherParams=OverMemoryKill\nJobAcctGatherFrequency=1\n' >>"$LAB/etc/slurm.conf"; fi
  local gres="" k
  : >"$LAB/etc/gres.conf"
  if ((GPUS > 0)) && make_fake_gpus; then
    gres="Gres=gpu:a100:$GPUS"  # a type, so that gpus: a100:1 is asked for as on a real one
    echo "GresTypes=gpu" >>"$LAB/etc/slurm.conf"
    printf 'AutoDetect=off\nName=gpu Type=a100 File=%s\n' "$FAKE" >"$LAB/etc/gres.conf"
  fi
  for k in $(seq "$NODES"); do
    echo "NodeName=n$k NodeHostName=localhost NodeAddr=$ADDR Port=$((PORT + 1 + k)) CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN"
  done >>"$LAB/etc/slurm.conf"
  cat >>"$LAB/etc/slurm.conf" <<E
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=$GRACE
PartitionName=high Nodes=ALL             MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
E
  if [[ $ACCT == 1 ]]; then
    (umask 077; cat >"$LAB/etc/slurmdbd.conf" <<E
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/socket
${COMM/NoCtldInAddrAny,/}
DbdHost=localhost
DbdAddr=$ADDR
DbdPort=$((PORT + 1))
SlurmUser=$ME
PidFile=$LAB/run/slurmdbd.own.pid
LogFile=$LAB/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=$ME
StorageLoc=slurm_acct_db
E
    )
  fi
  # From 23.02 the daemons ask for a cgroup unless told otherwise; before, they do not know the word.
  if [[ $(slurmd -V) != *" 2"[012].* ]]; then echo CgroupPlugin=disabled >"$LAB/etc/cgroup.conf"; fi
  { echo "export SLURM_CONF=$SLURM_CONF"; [[ $ACCT == 1 ]] || echo "export PATH=$LAB/bin:\$PATH"; } >"$LAB/env.sh"
}

make_fake_gpus() { # gres.conf wants device nodes: clones of /dev/null, or (not root) the consoles; never opened
  local i
  FAKE="$LAB/dev/nvidia[0-$((GPUS - 1))]"
  for i in $(seq 0 $((GPUS - 1))); do
    [[ -c $LAB/dev/nvidia$i ]] || mknod "$LAB/dev/nvidia$i" c 1 3 2>/dev/null || FAKE="/dev/tty[0-$((GPUS - 1))]"
  done
  if [[ $FAKE == /dev/tty* && ! -c /dev/tty$((GPUS - 1)) ]]; then say "no device nodes to use: no fake GPUs"; return 1; fi
}

write_sacct() {
  cat >"$LAB/bin/sacct" <<'E'
#!/usr/bin/env bash
# Stand-in for sacct without accounting: `-o FIELDS -j IDS` with JobID, State, ExitCode, NodeList; -n drops the head.
ids=() fields=JobID,State,NodeList head=1
while (($#)); do
  case $1 in
    -j) IFS=, read -ra more <<<"$2"; ids+=("${more[@]}"); shift 2 ;;
    -o) fields=$2; shift 2 ;;
    -n) head=0; shift ;;
    *) shift ;;
  esac
done
declare -A code=([JobID]=%i [State]=%T [ExitCode]= [NodeList]=%N)
IFS=, read -ra names <<<"$fields"
((head)) && (IFS='|'; echo "${names[*]}")
format=""
for name in "${names[@]}"; do format+="${code[$name]}|"; done
for id in "${ids[@]}"; do squeue -h -a -r --states=all -j "$id" -o "${format%|}" 2>/dev/null; done
exit 0
E
  chmod +x "$LAB/bin/sacct"
}

start_db() {
  if [[ ! -d $LAB/db/mysql ]]; then
    mariadb-install-db --no-defaults --user="$ME" --datadir="$LAB/db" --skip-test-db \
      --auth-root-authentication-method=socket --auth-root-socket-user="$ME" >"$LAB/log/mariadb-install.log" 2>&1
  fi
  spawn mariadbd mariadbd --no-defaults --user="$ME" --datadir="$LAB/db" --socket="$LAB/run/mysql.sock" \
    --skip-networking --innodb-buffer-pool-size=64M --innodb-log-file-size=32M \
    --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0
  wait_for 60 mariadbd db --user="$ME" ping
  spawn slurmdbd slurmdbd -D
  wait_for 60 slurmdbd port_open $((PORT + 1))
}

start() {
  local t0=$EPOCHREALTIME k tool
  for tool in munged slurmctld slurmd sbatch; do
    command -v $tool >/dev/null || { say "$tool is not here: apt-get install slurm-wlm munge"; exit 2; }
  done
  mkdir -p "$LAB"/{munge,etc,state,log,run,bin,dev}
  for k in $(seq "$NODES"); do mkdir -p "$LAB/spool/n$k"; done
  chmod 755 "$LAB" "$LAB/munge"      # munged refuses a socket directory others can write
  if [[ -f $LAB/run/slurmctld.pid ]] && alive "$(<"$LAB/run/slurmctld.pid")"; then say "already running: source $LAB/env.sh"; return 0; fi
  if [[ ! -f $LAB/munge/key ]]; then (umask 077; head -c 1024 /dev/urandom >"$LAB/munge/key"); fi
  if [[ $ETC_HOSTS == 1 && -w /etc/hosts ]] && ! grep -q '# slurm-lab$' /etc/hosts; then
    local own=""; getent ahostsv4 "$HOST" >/dev/null || own="$HOST "
    echo "127.0.0.1 $own$(seq -f 'n%g' -s ' ' "$NODES") # slurm-lab" >>/etc/hosts
  fi
  pick_addr; write_conf; write_sacct
  spawn munged munged --foreground --force --key-file="$LAB/munge/key" --socket="$LAB/munge/socket" \
    --pid-file="$LAB/munge/pid" --log-file="$LAB/munge/log" --seed-file="$LAB/munge/seed"
  wait_for 20 munged munge_ok
  if [[ $ACCT == 1 ]]; then start_db; fi
  spawn slurmctld slurmctld -D
  wait_for 30 slurmctld scontrol -Q ping
  for k in $(seq "$NODES"); do spawn "slurmd.n$k" slurmd -D -N "n$k"; done
  wait_for 30 nodes all_idle
  say "up in $(awk -v a="$t0" -v b="$EPOCHREALTIME" 'BEGIN{printf "%.1f", b-a}') s, $NODES nodes; to use it in this shell, type"
  say "  source $LAB/env.sh && sinfo"
}

end_pid() { # end_pid FILE: end the process we started, and only if it still is ours
  local f=$1 pid name; pid=$(<"$f"); name=$(basename "$f" .pid); name=${name%%.*}
  if alive "$pid" && [[ $(<"/proc/$pid/comm") == "$name"* ]]; then
    kill "$pid"
    for _ in $(seq 150); do alive "$pid" || break; sleep 0.1; done
    if alive "$pid"; then say "$name ($pid) did not end, killing it"; kill -9 "$pid"; fi
  fi
  rm -f "$f"
}
stop() {
  local f
  if [[ -f $LAB/run/slurmctld.pid ]] && alive "$(<"$LAB/run/slurmctld.pid")"; then
    # job steps outlive slurmd: cancel them first
    squeue -h -o '%A' 2>/dev/null | sort -u | xargs -r -n 200 scancel 2>/dev/null || true
    wait_for 25 "jobs to end" bash -c '! squeue -h -o %i | grep -q .' || true
  fi
  for f in "$LAB"/run/slurmd.n*[0-9].pid "$LAB"/run/{slurmctld,slurmdbd,mariadbd,munged}.pid; do
    if [[ -f $f ]]; then end_pid "$f"; fi
  done
  # /etc/hosts is often a bind mount: rewrite in place, no rename
  if [[ $ETC_HOSTS == 1 && -w /etc/hosts ]] && grep -q '# slurm-lab$' /etc/hosts; then
    local keep; keep=$(grep -v '# slurm-lab$' /etc/hosts); printf '%s\n' "$keep" >/etc/hosts
  fi
  say "stopped"
}
undelay() { # a requeued job is held for 120 s (Reason=BeginTime)
  # Not at once: a node revokes a killed job's credentials by the second, and would fail a restart in the same one.
  squeue -h -t PD -r -o '%i %r %S' | while read -r j reason start; do
    [[ $reason == BeginTime ]] && (($(date -d "$start" +%s 2>/dev/null || echo 0) > $(date +%s) + 3)) || continue
    scontrol update "JobId=$j" StartTime=now+2
  done
}
offspring() { # offspring PID...: the processes below these, and these
  local p c
  for p in "$@"; do
    for c in $(cat /proc/"$p"/task/*/children 2>/dev/null); do offspring "$c"; done
    echo "$p"
  done
}
fail_node() { # the daemon, its job steps (they bear the node's spool path or were started by it) and their tasks
  local node=$1 pid steps=()
  for pid in $(pgrep -x slurmstepd || true); do
    if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "SLURM_CONF=$SLURM_CONF" &&
      tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q . &&
      readlink "/proc/$pid/cwd" | grep -q "^$LAB/spool/$node" 2>/dev/null; then steps+=("$pid"); fi
  done
  kill -9 $(offspring "$(<"$LAB/run/slurmd.$node.pid")" "${steps[@]}") 2>/dev/null || true
  scontrol update "NodeName=$node" State=DOWN Reason=failed
}
mend_node() {
  spawn "slurmd.$1" slurmd -D -N "$1"
  scontrol update "NodeName=$1" State=RESUME 2>/dev/null || true
  wait_for 30 nodes all_idle
}

case ${1:-} in
  start) start ;;
  fail) fail_node "$2" ;;
  mend) mend_node "$2" ;;
  stop) stop ;;
  wipe) stop; rm -rf "$LAB" ;;
  undelay) undelay ;;
  status) scontrol ping; sinfo -N -l; squeue ;;
  *) sed -n '2,/^set /p' "$0" | grep '^#'; exit 2 ;;
esac
