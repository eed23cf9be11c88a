"""``hvdbridge run``: run an unmodified Horovod script without Horovod; see :mod:`hvdbridge.run`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, metavar="MODULE ...", help="run a module, with its arguments")
    parser.add_argument("script", nargs=rest, metavar="SCRIPT ...", help="run a script, with its arguments")


def run(arguments: argparse.Namespace) -> int:
    from hvdbridge import run

    run.main(arguments.script if arguments.module is None else ["-m", *arguments.module])
    return 0
