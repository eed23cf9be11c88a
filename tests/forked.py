"""``python -S -E forked.py script ...``: ``python script ...``, but forked from the test session's fork server.

Launchers start this for tests in place of ``python``: a rank then imports nothing. It gets this process's environment,
working directory, namespaces and open files (MPICH's ranks are given a socket). Signals are passed on to it, and its
exit status becomes this process's. It ends when this process is killed.
"""

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("uts", "net", "mnt")
RANKS = ("RANK", "HOROVOD_RANK", "PMI_RANK")


def main() -> None:
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # less the one that listed them
    folder = os.environ["JOBS_FORK_SERVERS"].split(" ", 1)[1]
    servers = sorted(name for name in os.listdir(folder) if name.isdigit())
    rank = int(next((os.environ[name] for name in RANKS if name in os.environ), "0"))
    ready, arrived = os.pipe()
    os.set_blocking(arrived, False)
    signal.set_wakeup_fd(arrived)
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(os.path.join(folder, servers[rank % len(servers)]))
        request = {
            "argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid(),
            "files": files, "namespaces": NAMESPACES,
        }  # fmt: skip
        places = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        text = json.dumps(request).encode()
        socket.send_fds(keeper, [len(text).to_bytes(4, "big")], files + places)
        keeper.sendall(text)
        while keeper not in select.select([keeper, ready], [], [])[0]:
            with suppress(BrokenPipeError, ConnectionResetError):  # it has just ended
                keeper.sendall(os.read(ready, 100))
        with keeper.makefile() as stream:
            report = json.loads(stream.readline() or '{"status": -9, "left": []}')
    status = report["status"]
    if report["left"]:
        print(f"processes that this rank left: {report['left']}", file=sys.stderr, flush=True)
        status = status or 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
