"""Run ``hvdbridge bench`` on simulated hosts: namespaces on one bridge, whose links have a limited rate and a delay.

    sudo "$(command -v python)" benchmarks/slow_network.py --mbits 100 --hosts 2 -- --policies mean int8

The options after ``--`` go to ``hvdbridge bench``. The script needs the right to create network namespaces, and removes
them at exit.
"""

from __future__ import annotations

import argparse
import os
import sys

from hosts import NoHosts, hosts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument(
        "--mbits", type=float, default=1000.0, help="what each host sends at most (default: %(default)s)"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet (default: %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    parser.add_argument("--launcher", choices=["torchrun", "horovodrun", "mpiexec"], default="torchrun")
    parser.add_argument("bench", nargs="*", metavar="-- ...", help="for hvdbridge bench")
    arguments = parser.parse_args()
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        if arguments.ranks_per_host < 1:
            raise ValueError(f"--ranks-per-host {arguments.ranks_per_host} must be positive")
        with hosts(arguments.hosts, arguments.mbits, arguments.delay_ms) as cluster:
            command = ["-m", "hvdbridge", "bench", *arguments.bench]
            commands = cluster.commands(arguments.launcher, arguments.ranks_per_host, command)
            statuses, _ = cluster.run(commands, env, quiet=False)
    except (NoHosts, ValueError) as error:
        print(f"benchmarks/slow_network.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
