"""The ``hvdbridge`` command. Each subcommand is a module, which is imported only if it is called.

A subcommand's module has ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit status).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from hvdbridge.errors import HvdbridgeError

# subcommand -> (module, help text)
COMMANDS = {
    "bench": ("hvdbridge.tools.bench.command", "measure policies against the native way of each backend"),
    "doctor": ("hvdbridge.tools.doctor", "what is installed, and what each launcher and backend would do here"),
    "install-horovod": ("hvdbridge.tools.install_horovod", "build Horovod against the torch that is installed"),
    "plan": ("hvdbridge.tools.plan", "predict step times at any number of ranks, and recommend a policy"),
    "run": ("hvdbridge.tools.run_script", "run an unmodified Horovod script, without Horovod"),
}


def parser_of(names: Collection[str]) -> argparse.ArgumentParser:
    """Return the command's parser. Of the subcommands only those of ``names`` have their options."""
    about = "One training script; torch.distributed, Horovod or MPI below it."
    parser = argparse.ArgumentParser(prog="hvdbridge", description=about)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{name}: {summary}.")
        if name in names:
            import_module(module).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    An :class:`.HvdbridgeError` becomes one message on stderr and status 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser_of(words[:1]).parse_args(words)
    try:
        return int(import_module(COMMANDS[arguments.command][0]).run(arguments))
    except HvdbridgeError as error:
        print(f"hvdbridge {arguments.command}: {error}", file=sys.stderr)
        return 2
