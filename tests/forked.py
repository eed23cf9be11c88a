"""``python -S -E forked.py script ...`` runs ``python script ...`` in a process forked from a fork server.

In tests launchers start this file in place of ``python``, so that a rank imports nothing. The rank gets this process's
environment, working directory, namespaces and open files (MPICH gives its ranks a socket). This process forwards
signals to the rank and exits with the rank's status. If this process is killed, the rank is killed, too.
"""

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("uts", "net", "mnt")
RANKS = ("RANK", "HOROVOD_RANK", "PMI_RANK")


def main() -> None:
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # without the one that listdir() used
    folder = os.environ["JOBS_FORK_SERVERS"].split(" ", 1)[1]
    servers = sorted(name for name in os.listdir(folder) if name.isdigit())
    rank = int(next((os.environ[name] for name in RANKS if name in os.environ), "0"))
    signals, signal_writer = os.pipe()
    os.set_blocking(signal_writer, False)
    signal.set_wakeup_fd(signal_writer)
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(os.path.join(folder, servers[rank % len(servers)]))
        request = {
            "argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid(),
            "files": files, "namespaces": NAMESPACES,
        }  # fmt: skip
        namespace_files = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        text = json.dumps(request).encode()
        socket.send_fds(keeper, [len(text).to_bytes(4, "big")], files + namespace_files)
        keeper.sendall(text)
        while keeper not in select.select([keeper, signals], [], [])[0]:
            with suppress(BrokenPipeError, ConnectionResetError):  # the rank has just ended
                keeper.sendall(os.read(signals, 100))
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


if __name__ == "__main__":
    main()
