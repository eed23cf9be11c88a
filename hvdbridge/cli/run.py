"""``hvdbridge run``: an unmodified Horovod script, without Horovod; see :mod:`hvdbridge.run`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS ...] | -m MODULE [ARGUMENTS ...]")


def run(arguments: argparse.Namespace) -> int:
    from hvdbridge import run

    run.main(arguments.words)
    return 0
