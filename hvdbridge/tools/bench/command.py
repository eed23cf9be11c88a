"""``hvdbridge bench``: what policies cost here, against the native way, under whatever launcher started it.

::

    torchrun --nproc-per-node 2 -m hvdbridge bench --models bert-base --policies mean bf16 int8
    horovodrun -np 4 hvdbridge bench --backends horovod
    hvdbridge bench                                        # no launcher: 2 ranks here, each backend by its own

A policy of your own is one that the module or file of a model registers: --models own.py:model --policies own:share=0.5
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hvdbridge.backends.starting import starter
from hvdbridge.errors import BackendUnavailable, ConfigurationError, Unsupported
from hvdbridge.startup import launchers

SHOW_SECONDS = 2.0
"""In which rank 0 shows its rows after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    backend = os.environ.get("HVDBRIDGE_BACKEND", "auto")
    parser.add_argument("--backends", default=backend, help="torch,horovod,mpi (default: %(default)s)")
    parser.add_argument(
        "--models", default="small", help="resnet50, bert-base, gpt2, small[:LAYERS], module:function, file.py:function"
    )
    parser.add_argument("--policies", nargs="+", default=["mean", "bf16", "int8"], metavar="SPEC")
    parser.add_argument(
        "--against", metavar="WAY", help="a native way: ddp, ddp-hook, ddp-fp16, ddp-topk, horovod, mpi-loop, ..."
    )
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each way (default: %(default)s)")
    parser.add_argument("--samples", type=int, help="images or tokens per step and rank")
    parser.add_argument("--bucket-mb", type=mib, metavar="MIB", help="size of a bucket, or auto (default: the usual)")
    parser.add_argument("--ranks", type=int, default=2, help="without a launcher (default: %(default)s)")
    several = "; without a launcher and with several backends a file for each, FILE's name with -BACKEND"
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write all figures{several}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw them (needs matplotlib){several}")


def mib(text: str) -> float | str:
    return text if text == "auto" else float(text)


def run(arguments: argparse.Namespace) -> int:
    from hvdbridge.tools.bench.checks import MOST_RANKS, MOST_STEPS, check_number, check_policies
    from hvdbridge.tools.bench.models import check_name
    from hvdbridge.tools.bench.report import check_plot

    check_number("--steps", arguments.steps, most=MOST_STEPS)
    check_number("--ranks", arguments.ranks, most=MOST_RANKS)
    if arguments.bucket_mb != "auto":
        check_number("--bucket-mb", arguments.bucket_mb)
    models = arguments.models.split(",")
    for model in models:
        check_name(model, arguments.samples)
    check_policies(arguments.policies, models)
    check_plot(arguments.plot)
    if launchers.detect().launcher != "none":
        return _measure(arguments)
    _check_files(arguments)
    return _launch(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError: one cannot be written here."""
    from hvdbridge.tools.bench.checks import check_file

    for option in ("json", "plot"):
        check_file(f"--{option}", getattr(arguments, option))


def _check_files_of_first(arguments: argparse.Namespace) -> None:
    """Rank 0 writes them, and its machine may be another one. Collective; raises ConfigurationError on all ranks."""
    import hvdbridge as hb

    refusal = None
    if hb.rank() == 0:
        try:
            _check_files(arguments)
        except ConfigurationError as error:
            refusal = str(error)
    refusal = hb.broadcast_object(refusal)
    if refusal is not None:
        hb.shutdown()
        raise ConfigurationError(refusal)


def _launch(arguments: argparse.Namespace) -> int:
    """Each backend under its own launcher, on this machine."""
    auto = arguments.backends == "auto"
    names = ["torch", "horovod", "mpi"] if auto else arguments.backends.split(",")
    words = sys.argv[1:]
    status = 0
    for name in names:
        ranks = str(arguments.ranks)
        lines = {
            "torch": ["torchrun", "--nproc-per-node", ranks, "--standalone", "-m"],
            "horovod": ["horovodrun", "-np", ranks, sys.executable, "-m"],
            "mpi": ["mpiexec", "-n", ranks, sys.executable, "-m"],
        }
        if name not in lines:
            raise ConfigurationError(f"--backends {name}: known are {', '.join(lines)}")
        line = [*lines[name], "hvdbridge", *words, "--backends", name]
        for option in ("json", "plot"):
            path = getattr(arguments, option)
            if path is not None and len(names) > 1 and (path.is_file() or not path.exists()):  # not /dev/stdout
                line += [f"--{option}", str(path.with_stem(f"{path.stem}-{name}"))]
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        program = shutil.which(line[0], path=places)
        if program is None and auto:
            print(f"{name}: left out: {line[0]} is not here (hvdbridge doctor)", file=sys.stderr)
            continue
        if program is None:
            raise ConfigurationError(f"{line[0]} is not here, which starts the {name} backend (hvdbridge doctor)")
        with subprocess.Popen([program, *line[1:]], env=os.environ | {"PATH": places}) as job:
            while job.poll() is None:
                try:
                    job.wait()
                except KeyboardInterrupt:  # the launcher has it, too: it ends the ranks, and they leave their rows
                    names = []
        if not names:
            return 130
        status |= job.returncode
    return status


def _missing(backend: str) -> str | None:
    """Why a backend that is not installed cannot run, which all ranks of one machine find alike.

    Raises:
        BackendUnavailable: so it is, and ranks of other machines may find otherwise: they would wait for this one.
    """
    if backend == "auto":
        return None
    world, chosen = launchers.detect(), starter(backend)()
    try:
        if chosen.running() is None:
            chosen.check(world)
    except BackendUnavailable as error:
        if world.local_size != world.size:
            raise
        return str(error)
    return None


@contextmanager
def _heard(interrupt: Callable[..., None]) -> Iterator[None]:
    """What SIGINT, and SIGTERM, by which horovodrun passes Ctrl-C on, do within. An exception that leaves has them do
    what they did before: while a hook for it waits for other ranks, launchers end this one by SIGTERM."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure(arguments: argparse.Namespace) -> int:
    import hvdbridge as hb
    from hvdbridge.tools.bench import report, transport
    from hvdbridge.tools.bench.measure import WARM_UP, Row, check, measure

    rows: list[Row] = []
    left_out: list[str] = []
    written: dict[Path, None] = {}
    link: transport.Network | None = None
    models = arguments.models.split(",")
    console = Console(stderr=True)
    first = launchers.detect().rank == 0
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    interrupted = leaving = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        if not leaving:
            raise KeyboardInterrupt

    def stepped(task: TaskID) -> None:
        progress.advance(task)
        if interrupted:  # in a place from which Python lets no exception out
            raise KeyboardInterrupt

    def tell(line: str) -> None:
        """What a bar would show, for those who look at a log, or through a launcher that is no terminal."""
        if first and not console.is_terminal:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show() -> None:
        for line in left_out:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if rows and link is not None:
            report.show(report.measured(rows))
            if arguments.plot is not None:
                report.plot_measured(arguments.plot, rows)
                written[arguments.plot] = None
            for path in written:
                console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)

    def leave() -> None:
        """Whatever ends it: a launcher's second signal takes neither the rows nor the reason from whom reads them."""
        nonlocal leaving
        leaving = True

    with ExitStack() as stack:
        stack.enter_context(_heard(interrupt))
        if first:
            stack.callback(show)  # whatever ends it: rows that were measured are not lost
        quiet = not (first and console.is_terminal)
        progress = stack.enter_context(Progress(*columns, console=console, disable=quiet))
        stack.callback(leave)
        try:
            for backend in arguments.backends.split(","):
                if (reason := _missing(backend)) is not None:
                    left_out.append(f"{backend}: left out: {reason}")
                    continue
                hb.init(backend=backend)
                if link is None:  # before anything is measured
                    _check_files_of_first(arguments)
                tell(f"{hb.backend()}: probing the network")
                link = transport.probe(hb.current().communicator, hb.device())
                for model in models:
                    for policy in arguments.policies:
                        cell = f"{hb.backend()} · {model} · {policy}"
                        try:
                            check(policy, arguments.against, arguments.steps)
                            task = progress.add_task(cell, total=WARM_UP + arguments.steps)
                            tell(cell)
                            rows.append(
                                measure(
                                    model, policy, arguments.against, link, arguments.steps, arguments.samples,
                                    arguments.bucket_mb,
                                    partial(stepped, task),
                                )
                            )  # fmt: skip
                        except (ConfigurationError, Unsupported) as error:
                            left_out.append(f"{cell}: left out: {error}")
                            continue  # the file's network is its last row's
                        tell(f"{cell}: {1e3 * rows[-1].step:.1f} ms a step")
                        if first and arguments.json is not None:  # after every row: Ctrl-C leaves those so far
                            report.save(arguments.json, link, rows)
                            written[arguments.json] = None
                hb.shutdown()
        except KeyboardInterrupt:
            interrupted = True
            leave()
        if interrupted and not first:
            time.sleep(SHOW_SECONDS)  # launchers end all ranks with the first
    if interrupted:
        sys.exit(130)  # said here, hb.init's exit hooks see it: a rank that is stuck in the native way ends, too
    return 0 if rows else 2
