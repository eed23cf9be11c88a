"""A Slurm cluster on this machine: munged, slurmctld, and one slurmd on each simulated host (``benchmarks.hosts``).

    with cluster() as slurm:
        job = slurm.run("srun -N 2 python train.py")

Everything lies in a temporary directory and ends with the block. Slurm sees four processors on each host, whatever the
machine has. A job has the environment of ``jobs.environment``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs
import psutil

from benchmarks.hosts import Hosts, hosts

CPUS = 4
START_SECONDS = 30.0
CONF = """
ClusterName=hvdbridge
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=3
MailProg=/bin/true
NodeName={names} CPUs={cpus} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class NoCluster(RuntimeError):
    """This machine cannot run such a cluster; the message says why."""


@dataclass
class Slurm:
    """A running cluster.

    Attributes:
        hosts: its hosts; commands run on the first one.
        folder: configuration, logs and state.
        extra: environment variables of all commands.
    """

    hosts: Hosts
    folder: Path
    extra: dict[str, str] = field(default_factory=dict)

    def environment(self, backend: str | None, **more: str) -> dict[str, str]:
        path = f"{jobs.BIN}{os.pathsep}{os.environ['PATH']}"
        # All hosts share one kernel. MPICH's UCX would detect that and bypass the network.
        fixed = {"UCX_TLS": "tcp,self", "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
        return jobs.environment(backend) | fixed | self.extra | more

    def popen(self, command: str, env: dict[str, str], host: int = 0, **options: Any) -> subprocess.Popen[str]:
        """Start a shell command on a host."""
        enter = [str(self.hosts.folder / "ssh"), self.hosts.addresses[host], command]
        return subprocess.Popen(enter, env=env, text=True, start_new_session=True, **options)

    def run(
        self, command: str, backend: str | None = None, size: int = 0, timeout: float = 60.0, **env: str
    ) -> jobs.Job:
        """Run a shell command on the first host. Its ranks, ``size`` of them, may leave records."""
        with tempfile.TemporaryDirectory(prefix="hvdbridge-slurm-") as out:
            environ = self.environment(backend, **({"TMPDIR": out, "JOB_RECORDS": out} | env))
            log, started = Path(out) / "log", time.monotonic()
            with log.open("w") as stream:
                process = self.popen(
                    command, environ, cwd=out, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
                )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = -1
            seconds = time.monotonic() - started
            if status == -1:
                self.command("scancel", "--full", "--user=root")
                process.terminate()
                time.sleep(1)
            left = self.wait_for_end(out)
            if process.poll() is None:
                process.kill()
                process.wait()
            output = log.read_text(errors="replace")
            for extra in sorted(Path(out).glob("*.out")):
                output += extra.read_text(errors="replace")
            assert not left, f"processes that the job left: {left}\n{output[-6000:]}"
            files = [Path(out) / f"{rank}.json" for rank in range(size)]
            records = [json.loads(file.read_text()) if file.exists() else None for file in files]
            return jobs.Job(status, seconds, output, records)

    def command(self, *words: str) -> str:
        """Run a command of Slurm on the first host, and return its output."""
        enter = [str(self.hosts.folder / "ssh"), self.hosts.addresses[0], " ".join(words)]
        environ = self.environment(None)
        done = subprocess.run(enter, env=environ, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout + done.stderr

    def wait_for_end(self, records: str, seconds: float = 10.0) -> list[str]:
        """Wait until no process of the job with this folder of records is left, and return those that are."""
        deadline = time.monotonic() + seconds
        while (left := jobs._of_job(records)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return [" ".join(process.info["cmdline"] or ()) for process in left]


@contextmanager
def cluster(count: int = 2, conf: str = "") -> Iterator[Slurm]:
    """Start a cluster of ``count`` hosts, with more lines of slurm.conf.

    Raises:
        NoCluster: a program is missing, or a daemon does not start.
        NoHosts: this machine cannot simulate hosts.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing:
        raise NoCluster(f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)")
    with tempfile.TemporaryDirectory(prefix="hvdbridge-slurm-") as root, hosts(count) as simulated:
        folder = Path(root)
        folder.chmod(0o755)
        slurm = Slurm(simulated, folder)
        names, addresses = simulated.names, simulated.addresses
        for own in ("state", *(f"{kind}-{name}" for name in names for kind in ("tmp", "spool"))):
            (folder / own).mkdir()
        (folder / "slurm.conf").write_text(
            CONF.format(first=names[0], address=addresses[0], folder=folder, names=",".join(names), cpus=CPUS) + conf
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2, where it is found, wants systemd
        daemons = []
        try:
            daemons.append(_munged(folder))
            env = slurm.environment(None)
            quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemons.append(slurm.popen("exec slurmctld -D -c", env, **quiet))
            daemons += [slurm.popen("exec slurmd -D", env, host, **quiet) for host in range(count)]
            _wait_for_nodes(slurm, count, daemons)
            yield slurm
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in reversed(daemons):
                try:
                    daemon.wait(5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _munged(folder: Path) -> subprocess.Popen[str]:
    """Start munged with a key of its own, and wait for its socket."""
    own = folder / "munge"
    own.mkdir(mode=0o700)
    key = own / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    socket = folder / "munge.socket"
    daemon = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", f"--pid-file={own}/pid",
         f"--log-file={own}/log", f"--seed-file={own}/seed"],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not socket.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            daemon.wait()
            raise NoCluster("munged does not start")
        time.sleep(0.05)
    return daemon


def _wait_for_nodes(slurm: Slurm, count: int, daemons: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while slurm.command("sinfo", "--noheader", "--Node", "--format=%T").split() != ["idle"] * count:
        if any(daemon.poll() is not None for daemon in daemons) or time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(slurm.folder.glob("*.log")))
            raise NoCluster(f"Slurm does not start:\n{logs}")
        time.sleep(0.2)
