"""A real Slurm cluster of two nodes on this host: munge, slurmctld and two slurmd in a folder of their own.

Preemption by priority (partition `urgent` over `train`), requeueing, and two fake GPUs a node (this
version counts none without a device file, so they are /dev/null and /dev/zero).
Ports are free ones, so it does not meet another cluster. Needs root and the packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = """
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=86400
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=train Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=REQUEUE \
GraceTime=30
PartitionName=urgent Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""
# What a site file holds here: both nodes are this host, and two busy cores have no room for spinning threads.
SITE = "export DSPARK_MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0\n"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own_munge: subprocess.Popen[bytes] | None = None
        for name in ("run", "log", "state", "spool.node1", "spool.node2"):
            (folder / name).mkdir(parents=True)
        text = CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n", encoding="utf-8")
        self.site = folder / "site.sh"
        self.site.write_text(SITE, encoding="utf-8")
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    # ------------------------------------------------------------------------------------------ daemons

    def start(self) -> None:
        self._munge()
        self._daemon("slurmctld")
        for node in ("node1", "node2"):
            self.start_node(node)
        self.until(lambda: self.run("sinfo", "-h", "-o", "%D", "-t", "idle").strip() == "2", 30, "two idle nodes")

    def start_node(self, name: str) -> None:
        self._daemon("slurmd", "-N", name)

    def _daemon(self, *words: str) -> None:
        """Daemons keep their output open, so it must not be a pipe that somebody waits on."""
        quiet = subprocess.DEVNULL
        subprocess.run(words, env=self.environ, stdin=quiet, stdout=quiet, stderr=quiet, check=True, timeout=30)

    def node_pid(self, name: str) -> int:
        return int((self.folder / "run" / f"slurmd.{name}.pid").read_text())

    def _munge(self) -> None:
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
            return
        for folder in ("/run/munge", "/var/log/munge"):
            subprocess.run(["install", "-d", "-o", "munge", "-g", "munge", folder], check=True)
        self._own_munge = subprocess.Popen(
            ["runuser", "-u", "munge", "--", "munged", "--foreground"], stderr=subprocess.DEVNULL
        )
        answers = ["munge", "-n"]
        self.until(lambda: subprocess.run(answers, capture_output=True, check=False).returncode == 0, 10, "munged")

    def stop(self) -> None:
        self.run("scancel", "--user=root", check=False)
        pids = [int(path.read_text()) for path in (self.folder / "run").glob("*.pid")]
        for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
            deadline = time.monotonic() + seconds
            for pid in filter(_alive, pids):
                os.kill(pid, number)
            while any(map(_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.1)
        if self._own_munge is not None:
            self._own_munge.terminate()
            self._own_munge.wait(timeout=10)

    # ------------------------------------------------------------------------------------------ jobs

    def run(self, *words: str, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run(words, env=self.environ, cwd=cwd, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def facts(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows of a job (of an array: of its first task listed)."""
        first = self.run("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def states(self, job: str) -> list[str]:
        """State of a job, or of every task of an array."""
        lines = self.run("scontrol", "show", "job", "-o", job).splitlines()
        return [word.partition("=")[2] for text in lines for word in text.split() if word.startswith("JobState=")]

    def wait(self, job: str, seconds: float) -> list[str]:
        """Wait until a job (all tasks of an array) has ended; its states."""
        self.until(lambda: all(state in ENDED for state in self.states(job)), seconds, f"the end of job {job}")
        return self.states(job)

    def until(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"no {what} within {seconds} s\n{self.report()}"
            time.sleep(0.25)

    def report(self) -> str:
        queue = subprocess.run(["squeue"], env=self.environ, capture_output=True, text=True, check=False).stdout
        control = self.folder / "log" / "slurmctld.log"
        return queue + (control.read_text(errors="replace")[-3000:] if control.exists() else "")


def why_not() -> str:
    """Why no cluster can be started here, or an empty string."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (apt-get install slurm-wlm munge): {', '.join(missing)} missing"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started as root"


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
