"""What clusters and containers are like: networks, few resources, unknown users. Jobs of two ranks, on each backend."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from launchers.conftest import Library
from launchers.shell import PLACES, TRAINS, check, environment, last_error, permitted, shell

from benchmarks.hosts import Hosts, NoHosts, sh

NATIVE = [(launcher, backend) for backend, launcher in jobs.NATIVE.items()]
LARGE = str(Path(__file__).parent / "scripts" / "large.py")
ACROSS = [0, 1]
"""The nodes of two ranks on two hosts."""


# -- one host --------------------------------------------------------------------------------------------


def trains(launcher: str, *script: str) -> str:
    """Return the command that starts ``script`` on two ranks; default: the one whose records ``check`` compares."""
    return shlex.join(jobs.command(launcher, 2, script or [PLACES, "again"], real=True))


SHARED_MEMORY = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && eval "$0"')
"""Run a shell command where /dev/shm has 64 MB, as in a container."""
FULL = "head -c 64M /dev/zero >/dev/shm/full"


@pytest.mark.parametrize(("launcher", "backend"), NATIVE)
def test_a_container_s_small_shared_memory(launcher: str, backend: str) -> None:
    """Messages of 100 MB pass on each backend, and no library warns."""
    permitted(*SHARED_MEMORY, "true")
    job = shell(trains(launcher, LARGE), backend, 2, enter=SHARED_MEMORY).check()
    for size, error in job.records:
        assert size == 2
        assert error < 1e-5
    assert "/dev/shm" not in job.output


def test_a_full_shared_memory_on_torch() -> None:
    """Gloo does not use it."""
    permitted(*SHARED_MEMORY, "true")
    check(shell(f"{FULL}; {trains('torchrun')}", "torch", 2, enter=SHARED_MEMORY), "torch", "torchrun")


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
@pytest.mark.parametrize("name", ["MPICH", "Intel MPI"])
def test_a_full_shared_memory_on_mpi(name: str, launcher: str, library: Callable[[str], Library]) -> None:
    """MPI_Init would end by SIGBUS. Each rank refuses before it, with a remedy."""
    permitted(*SHARED_MEMORY, "true")
    found = library(name)
    start = f"{found.mpiexec} -n 2 {found.python}"
    if launcher == "torchrun":
        start = f"{found.python} -m torch.distributed.run --standalone --nproc-per-node 2"
    job = shell(f"{FULL}; {start} {TRAINS}", "mpi", 2, enter=SHARED_MEMORY)
    assert job.status > 0
    assert job.records == [None, None]
    text = last_error(job.output, "BackendUnavailable")
    assert " has 0.0 MB free" in text
    assert "--shm-size" in text
    assert "BAD TERMINATION" not in job.output


def test_a_full_shared_memory_and_one_process() -> None:
    permitted(*SHARED_MEMORY, "true")
    job = shell(f"{FULL}; python {PLACES}", "mpi", 1, enter=SHARED_MEMORY)
    assert job.status == 1
    assert " has 0.0 MB free" in last_error(job.output, "BackendUnavailable")


@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5"])
def test_a_full_shared_memory_on_open_mpi(name: str, library: Callable[[str], Library]) -> None:
    """It goes on by another transport."""
    permitted(*SHARED_MEMORY, "true")
    found = library(name)
    command = f"{FULL}; {found.mpiexec} -n 2 --oversubscribe {found.python} {TRAINS}"
    check(shell(command, "mpi", 2, env=environment("mpi", **found.env), enter=SHARED_MEMORY), "mpi", "mpiexec")


def test_a_full_shared_memory_under_horovodrun() -> None:
    """horovodrun itself needs a semaphore, and says why it ends."""
    permitted(*SHARED_MEMORY, "true")
    job = shell(f"{FULL}; {trains('horovodrun')}", "horovod", 2, enter=SHARED_MEMORY)
    assert job.status == 1
    assert "OSError: [Errno 28] No space left on device" in job.output


@pytest.mark.parametrize(("launcher", "backend"), NATIVE)
def test_few_open_files(launcher: str, backend: str) -> None:
    check(shell(f"ulimit -n 64 && exec {trains(launcher)}", backend, 2), backend, launcher)


@pytest.mark.parametrize(
    ("launcher", "backend", "limit", "text"),
    [
        ("torchrun", "torch", 32, "epoll_create: Too many open files"),
        ("horovodrun", "horovod", 14, "Too many open files"),
        ("mpiexec", "mpi", 24, "try to increase the limit by setting the max open files limit (ulimit -n)"),
    ],
)
def test_too_few_open_files(launcher: str, backend: str, limit: int, text: str) -> None:
    """The job ends with an error that names the limit."""
    job = shell(f"ulimit -n {limit} && exec {trains(launcher)}", backend, 2, timeout=60)
    assert job.status > 0
    assert text in job.output


@pytest.mark.parametrize(("launcher", "backend"), NATIVE)
def test_a_user_without_name_and_home(launcher: str, backend: str) -> None:
    unset = [word for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "HVDBRIDGE_CACHE") for word in ("-u", name)]
    enter = ("unshare", "--user", "--map-user=12345", "env", *unset, "bash", "-c")
    permitted(*enter, "true")
    check(shell(f"test $(id -u) = 12345 && exec {trains(launcher)}", backend, 2, enter=enter), backend, launcher)


def test_variables_of_a_service_named_hvdbridge() -> None:
    injected = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "PORT": "tcp://10.0.0.1:80"}
    env = environment("torch", **{f"HVDBRIDGE_{name}": value for name, value in injected.items()})
    check(shell(trains("torchrun"), "torch", 2, env=env), "torch", "torchrun")


# -- two hosts -------------------------------------------------------------------------------------------


def across(hosts: Hosts, lines: list[list[str]], backend: str, folder: Path, **env: str) -> jobs.Job:
    """Run a command on each host, or one on the first; the job's status is the highest."""
    variables = environment(backend, JOB_RECORDS=str(folder), **env)
    statuses, output = hosts.run(lines, variables, timeout=120)
    files = [folder / f"{rank}.json" for rank in range(2)]
    records = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return jobs.Job(max(statuses), 0.0, output, records)


def set_up(*command: str) -> None:
    """Change a host, or skip the test where the kernel refuses that: it may lack IPv6, bridges or nf_tables."""
    try:
        sh(*command)
    except NoHosts as error:
        pytest.skip(str(error))


def bridge(hosts: Hosts) -> None:
    """Give both hosts a container bridge with one address, and no network in common: their addresses are routes."""
    for name, own in zip(hosts.names, hosts.addresses, strict=True):
        set_up("ip", "-n", name, "link", "add", "docker0", "type", "bridge")
        set_up("ip", "-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
        set_up("ip", "-n", name, "link", "set", "docker0", "up")
        set_up("ip", "-n", name, "address", "flush", "dev", "net0", "scope", "global")
        set_up("ip", "-n", name, "address", "add", f"{own}/32", "dev", "net0")
        for other in hosts.addresses:
            if other != own:
                set_up("ip", "-n", name, "route", "add", f"{other}/32", "dev", "net0", "src", own)


@pytest.mark.parametrize(
    ("launcher", "backend"), [*NATIVE, ("mpiexec", "torch"), ("mpiexec", "horovod"), ("torchrun", "mpi")]
)
def test_a_bridge_with_one_address_on_every_host(
    launcher: str, backend: str, hosts: Hosts, tmp_path: Path
) -> None:
    bridge(hosts)
    job = across(hosts, hosts.commands(launcher, 1, [PLACES, "again"]), backend, tmp_path)
    check(job, backend, launcher, ACROSS)


@pytest.mark.parametrize(("launcher", "backend"), [*NATIVE, ("torchrun", "horovod")])
def test_names_that_do_not_resolve(launcher: str, backend: str, hosts: Hosts, tmp_path: Path) -> None:
    """Horovod's Gloo needs the address of the host's own name, so every rank is refused; the others need no name."""
    for name in hosts.names:
        (Path("/etc/netns") / name / "hosts").write_text("127.0.0.1 localhost\n")
    job = across(hosts, hosts.commands(launcher, 1, [PLACES, "again"]), backend, tmp_path)
    if backend != "horovod":
        check(job, backend, launcher, ACROSS)
        return
    assert job.status == 1
    assert job.records == [None, None]
    text = last_error(job.output, "BackendUnavailable")
    assert "/etc/hosts" in text


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_ipv6_alone(backend: str, hosts: Hosts, tmp_path: Path) -> None:
    """torchrun meets by IPv6. hvdbridge needs IPv4 between hosts, and refuses on every rank at once."""
    addresses = [f"fd00:77::{i + 1}" for i in range(2)]
    for name, address in zip(hosts.names, addresses, strict=True):
        set_up("ip", "-n", name, "address", "flush", "dev", "net0", "scope", "global")
        set_up("ip", "-n", name, "address", "add", f"{address}/64", "dev", "net0", "nodad")
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(addresses, hosts.names, strict=True))]
        (Path("/etc/netns") / name / "hosts").write_text("\n".join(lines) + "\n")
    lines = [
        [word.replace(hosts.addresses[0], addresses[0]) for word in line]
        for line in hosts.commands("torchrun", 1, [PLACES])
    ]
    job = across(hosts, lines, backend, tmp_path)
    assert job.status == 1
    assert job.records == [None, None]
    text = last_error(job.output, "RendezvousError")
    assert text.startswith("rank 0's host has no IPv4 address that other hosts reach")
    assert "HVDBRIDGE_IFACE" in text
    assert job.output.count("Error: rank 0's host has no IPv4 address") == 2


def close_ports(hosts: Hosts) -> None:
    """Open only ports 25000 to 25099 between the hosts."""
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed: make test-launchers installs Debian's nftables, as root")
    rules = (
        "add table inet f; add chain inet f i { type filter hook input priority 0; policy drop; }; "
        "add rule inet f i iif lo accept; add rule inet f i ct state established accept; "
        "add rule inet f i tcp dport 25000-25099 accept; add rule inet f i icmp type echo-request accept"
    )
    for name in hosts.names:
        set_up("ip", "netns", "exec", name, "nft", rules)


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "mpi"), ("mpiexec", "mpi"), ("torchrun", "torch")])
def test_a_firewall_with_a_range_of_ports(launcher: str, backend: str, hosts: Hosts, tmp_path: Path) -> None:
    """Gloo takes the kernel's ports, which are set to the open ones."""
    close_ports(hosts)
    if backend == "torch" or launcher == "mpiexec":  # Hydra's proxies connect to the kernel's ports
        for name in hosts.names:
            set_up("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_local_port_range=25000 25099")
    lines = hosts.commands(launcher, 1, [PLACES, "again"], port=25099)
    job = across(hosts, lines, backend, tmp_path, HVDBRIDGE_PORTS="25000-25098")
    check(job, backend, launcher, ACROSS)


def test_a_firewall_and_the_kernel_s_own_ports(hosts: Hosts, tmp_path: Path) -> None:
    """Gloo waits at a port that is closed. The error repeats the warning, which names the setting."""
    close_ports(hosts)
    lines = hosts.commands("torchrun", 1, [PLACES, "again"], port=25099)
    job = across(hosts, lines, "torch", tmp_path, HVDBRIDGE_PORTS="25000-25098", HVDBRIDGE_START_SECONDS="15")
    assert job.status == 1
    ends = [line for line in job.output.splitlines() if " ends: init_process_group is not finished after " in line]
    assert ends, job.output[-6000:]
    for text in ends:
        assert "ranks 0-1 wait in init_process_group. HVDBRIDGE_PORTS=25000-25098: Gloo" in text
        assert "sysctl net.ipv4.ip_local_port_range='25000 25098' on each host" in text
