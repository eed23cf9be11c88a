"""A Slurm cluster on this machine: munged, slurmctld, and one slurmd on each simulated host (``benchmarks.hosts``).

    with cluster() as slurm:
        job = slurm.run("srun -N 2 python train.py")

Everything lies in a temporary directory and ends with the block. Slurm sees four processors on each host, whatever the
machine has. A job has the environment of ``jobs.environment``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
from launchers.shell import environment, shell

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
MailProg=/bin/true
NodeName={names} CPUs={cpus} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class NoCluster(RuntimeError):
    """A program of Slurm is not installed; the message names it."""


@dataclass
class Slurm:
    """A running cluster.

    Attributes:
        hosts: its hosts; commands run on the first one.
        folder: configuration, logs and state.
    """

    hosts: Hosts
    folder: Path

    @property
    def enter(self) -> list[str]:
        """The command that runs a shell command on the first host."""
        return [str(self.hosts.folder / "ssh"), self.hosts.addresses[0]]

    def environment(self, backend: str | None, **more: str) -> dict[str, str]:
        # All hosts share one kernel. MPICH's UCX would detect that and bypass the network. Launchers find our ssh.
        path = f"{self.hosts.folder}{os.pathsep}{jobs.BIN}{os.pathsep}{os.environ['PATH']}"
        fixed = {"UCX_TLS": "tcp,self", "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
        return environment(backend, **fixed, **more)

    def run(
        self, command: str, backend: str | None = None, size: int = 0, timeout: float = 90.0, **env: str
    ) -> jobs.Job:
        """Run a shell command on the first host, and cancel all jobs if it takes too long."""
        variables = self.environment(backend) | env
        return shell(
            command, backend, size, timeout, env=variables, enter=self.enter,
            cancel=lambda: self.command("scancel --full --user=root"),
        )  # fmt: skip

    def batch(self, lines: str, options: str, backend: str | None = None, size: int = 0, **env: str) -> jobs.Job:
        """Run a batch script and wait for it; ``sbatch --wait`` would look once in half a minute."""
        script = f"#!/bin/bash\n{lines}\n"
        submit = f"printf %s {shlex.quote(script)} | sbatch --parsable -o %j.out {options}"
        wait = 'while squeue -h -j "$job" | grep -q .; do sleep 0.3; done'
        status = 'scontrol show job "$job" | grep -q "ExitCode=0:0"'
        return self.run(f"job=$({submit}) && {wait}; {status}", backend, size, **env)

    def command(self, command: str) -> str:
        """Run a command of Slurm on the first host, and return its output."""
        done = subprocess.run(
            [*self.enter, command], env=self.environment(None), capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout + done.stderr


@contextmanager
def cluster(count: int = 2, conf: str = "") -> Iterator[Slurm]:
    """Start a cluster of ``count`` hosts, with more lines of slurm.conf.

    Raises:
        NoCluster: a program is missing.
        NoHosts: this machine cannot simulate hosts: no root, or network namespaces are refused.
        RuntimeError: a daemon does not start.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing:
        raise NoCluster(f"not installed: {', '.join(missing)}: make test-launchers installs Debian's, as root")
    with tempfile.TemporaryDirectory(prefix="hvdbridge-slurm-") as root, hosts(count) as simulated:
        folder = Path(root)
        folder.chmod(0o755)
        slurm = Slurm(simulated, folder)
        names, addresses = simulated.names, simulated.addresses
        for name in names:  # torch's store looks for the names of IPv4 addresses in the form of IPv6
            with (Path("/etc/netns") / name / "hosts").open("a") as lines:
                lines.writelines(f"::ffff:{line[0]} {line[1]}\n" for line in zip(addresses, names, strict=True))
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
            lines = ["exec slurmctld -D -c", *["exec slurmd -D"] * count]
            for address, line in zip([addresses[0], *addresses], lines, strict=True):
                enter = [str(simulated.folder / "ssh"), address, line]
                daemons.append(subprocess.Popen(enter, env=env, start_new_session=True, **quiet))
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


def _munged(folder: Path) -> subprocess.Popen[bytes]:
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
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not socket.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            daemon.wait()
            lines = "".join(log.read_text()[-1500:] for log in own.glob("log"))
            raise RuntimeError(f"munged does not start:\n{lines}")
        time.sleep(0.05)
    return daemon


def _wait_for_nodes(slurm: Slurm, count: int, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while slurm.command("sinfo --noheader --Node --format=%T").split() != ["idle"] * count:
        if any(daemon.poll() is not None for daemon in daemons) or time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(slurm.folder.glob("*.log")))
            raise RuntimeError(f"Slurm does not start:\n{logs}")
        time.sleep(0.2)
