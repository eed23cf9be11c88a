"""``hvdbridge bench``: what policies cost here, against the native way, under whatever launcher started it.

::

    torchrun --standalone --nproc-per-node 2 -m hvdbridge bench --models small:4 --steps 5 --json bench.json
    horovodrun -np 2 hvdbridge bench --models small:4 --steps 5 --policies mean
    hvdbridge bench --models small:4 --steps 5 --policies mean    # no launcher: 2 ranks here, each backend by its own

A policy of your own is one that the module or file of a model registers: --models own.py:model --policies own:share=0.5

The columns of the table; times are medians over steps, in milliseconds, of the slowest rank::

    step         one training step with hvdbridge
    compute      the same without synchronization
    compress     the policy's arithmetic
    communicate  time in which a collective was in flight
    exposed      synchronization that backward did not hide: step - compute (- compress, on less than two cores a rank)
    bucket       size of hvdbridge's buckets, MiB
    MB/step      megabytes that a rank sends in a step
    MB/s         MB/step divided by communicate
    /native      step divided by the native way's step; below 1 hvdbridge is faster
    quartiles    lower and upper quartile of /native over steps: where they include 1, it shows no difference
    /limit       step divided by its lower bound: arithmetic, or bytes at the network's rate, whichever takes longer
"""

from __future__ import annotations

import argparse
import itertools
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
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hvdbridge.backends.starting import starter
from hvdbridge.errors import BackendUnavailable, ConfigurationError, Unsupported
from hvdbridge.startup import launchers

if TYPE_CHECKING:
    from hvdbridge.tools.bench.measure import Row

SHOW_SECONDS = 2.0
"""How long other ranks wait after Ctrl-C, while rank 0 shows its rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    option = parser.add_argument
    backend = os.environ.get("HVDBRIDGE_BACKEND", "auto")
    option("--backends", default=backend, help="names, separated by commas: torch,horovod,mpi (default: %(default)s)")
    known = "models, separated by commas: resnet50, bert-base, gpt2, small[:LAYERS], module:function, file.py:function"
    option("--models", default="small", help=known)
    option("--policies", nargs="+", default=["mean", "bf16", "int8"], metavar="SPEC", help="policies to measure")
    known = "the native way to compare with: ddp, ddp-hook, ddp-fp16, ddp-topk, horovod, mpi-loop, ..."
    option("--against", metavar="WAY", help=known)
    option("--steps", type=int, default=30, help="counted steps of each way (default: %(default)s)")
    option("--samples", type=int, help="images or tokens per step and rank")
    option("--bucket-mb", type=mib, metavar="MIB", help="size of a bucket, or auto (default: the usual)")
    option("--ranks", type=int, default=2, help="number of ranks, without a launcher (default: %(default)s)")
    several = ". Without a launcher each of several backends has a file of its own, FILE's name with -BACKEND"
    option("--json", type=Path, metavar="FILE", help=f"write all figures{several}")
    option("--plot", type=Path, metavar="FILE", help=f"draw the figures (needs matplotlib){several}")


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
        return _Session(arguments).run()
    _check_files(arguments)
    return _launch(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError if a file of --json or --plot cannot be written on this machine."""
    from hvdbridge.tools.bench.checks import check_file

    for option in ("json", "plot"):
        check_file(f"--{option}", getattr(arguments, option))


def _launch(arguments: argparse.Namespace) -> int:
    """Run each backend under its own launcher on this machine, and return the exit status."""
    auto, ranks = arguments.backends == "auto", str(arguments.ranks)
    names = ["torch", "horovod", "mpi"] if auto else arguments.backends.split(",")
    launch_commands = {
        "torch": ["torchrun", "--nproc-per-node", ranks, "--standalone", "-m"],
        "horovod": ["horovodrun", "-np", ranks, sys.executable, "-m"],
        "mpi": ["mpiexec", "-n", ranks, sys.executable, "-m"],
    }
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    status = 0
    for name in names:
        if name not in launch_commands:
            raise ConfigurationError(f"--backends {name}: known are {', '.join(launch_commands)}")
        command = [*launch_commands[name], "hvdbridge", *sys.argv[1:], "--backends", name]
        for option in ("json", "plot"):
            path = getattr(arguments, option)
            if path is not None and len(names) > 1 and (path.is_file() or not path.exists()):  # not /dev/stdout
                command += [f"--{option}", str(path.with_stem(f"{path.stem}-{name}"))]
        program = shutil.which(command[0], path=search_path)
        if program is None and not auto:
            raise ConfigurationError(f"{command[0]} is not here, which starts the {name} backend (hvdbridge doctor)")
        if program is None:
            print(f"{name}: left out: {command[0]} is not here (hvdbridge doctor)", file=sys.stderr)
            continue
        interrupted = False
        with subprocess.Popen([program, *command[1:]], env=os.environ | {"PATH": search_path}) as job:
            while job.poll() is None:
                try:
                    job.wait()
                except KeyboardInterrupt:  # the launcher gets it, too, and ends the ranks, which then show their rows
                    interrupted = True
        if interrupted:
            return 130
        status |= job.returncode
    return status


def _missing(backend: str) -> str | None:
    """Return why a backend is unavailable, or None. All ranks of one machine come to the same result.

    Raises:
        BackendUnavailable: the backend is unavailable, and the job has several machines. On another machine it may be
            available, and the ranks there would wait for this one.
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
def _handle_signals(interrupt: Callable[..., None]) -> Iterator[None]:
    """Let ``interrupt`` handle SIGINT and SIGTERM (horovodrun sends SIGTERM for Ctrl-C). The former handlers return,
    also after an exception, because launchers end a rank by SIGTERM while its exit hook waits for other ranks."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Session:
    """A measurement of all backends, models and policies by the ranks of a job.

    Attributes:
        interrupted: SIGINT or SIGTERM arrived.
        showing: the results are being shown, so a signal must not raise KeyboardInterrupt any more.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.console = Console(stderr=True)
        self.is_rank_0 = launchers.detect().rank == 0
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.written: dict[Path, None] = {}
        self.interrupted = self.showing = False
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        quiet = not (self.is_rank_0 and self.console.is_terminal)
        text = TextColumn("{task.description}", markup=False)
        self.progress = Progress(text, *columns, console=self.console, disable=quiet)

    def run(self) -> int:
        """Measure everything, and return the exit status. Rank 0 shows the rows so far, also after an error."""
        with ExitStack() as stack:
            stack.enter_context(_handle_signals(self.interrupt))
            if self.is_rank_0:
                stack.callback(self.show)
            stack.enter_context(self.progress)
            stack.callback(self.enter_showing)
            try:
                for backend in self.arguments.backends.split(","):
                    self.measure(backend)
            except KeyboardInterrupt:
                self.interrupted = True
                self.enter_showing()
            if self.interrupted and not self.is_rank_0:
                time.sleep(SHOW_SECONDS)  # launchers end all ranks when the first one exits
        if self.interrupted:
            sys.exit(130)  # hb.init has replaced it by one that also ends a rank which is stuck in the native way
        return 0 if self.rows else 2

    def measure(self, backend: str) -> None:
        """Measure every model and policy on one backend, and note those that cannot be measured in ``left_out``."""
        import hvdbridge as hb
        from hvdbridge.tools.bench.measure import WARM_UP, check, measure
        from hvdbridge.tools.bench.report import save
        from hvdbridge.tools.bench.transport import probe

        if (reason := _missing(backend)) is not None:
            self.left_out.append(f"{backend}: left out: {reason}")
            return
        args = self.arguments
        hb.init(backend=backend)
        self.check_files()
        self.log_progress(f"{hb.backend()}: probing the network")
        network = probe(hb.current().communicator, hb.device())
        for model, policy in itertools.product(args.models.split(","), args.policies):
            cell = f"{hb.backend()} · {model} · {policy}"
            try:
                check(policy, args.against, args.steps)
                task = self.progress.add_task(cell, total=WARM_UP + args.steps)
                self.log_progress(cell)
                on_step = partial(self.on_step, task)
                row = measure(model, policy, args.against, network, args.steps, args.samples, args.bucket_mb, on_step)
            except (ConfigurationError, Unsupported) as error:
                self.left_out.append(f"{cell}: left out: {error}")
                continue  # without a save, because a file has the network of its last row
            self.rows.append(row)
            self.log_progress(f"{cell}: {1e3 * row.step:.1f} ms a step")
            if self.is_rank_0 and args.json is not None:  # after every row, so that Ctrl-C loses none
                save(args.json, network, self.rows)
                self.written[args.json] = None
        hb.shutdown()

    def check_files(self) -> None:
        """Check on rank 0, which writes the files; raise ConfigurationError on all ranks if it cannot. Collective."""
        import hvdbridge as hb

        refusal = None
        if self.is_rank_0:
            try:
                _check_files(self.arguments)
            except ConfigurationError as error:
                refusal = str(error)
        refusal = hb.broadcast_object(refusal)
        if refusal is not None:
            hb.shutdown()
            raise ConfigurationError(refusal)

    def log_progress(self, line: str) -> None:
        """Print progress as a line of text where stderr is no terminal, such as in a log or under a launcher."""
        if self.is_rank_0 and not self.console.is_terminal:
            self.print(line)

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self) -> None:
        from hvdbridge.tools.bench import report

        for line in self.left_out:
            self.print(line)
        if self.rows:
            report.show(report.measured(self.rows))
            if self.arguments.plot is not None:
                report.plot_measured(self.arguments.plot, self.rows)
                self.written[self.arguments.plot] = None
            for path in self.written:
                self.print(f"written: {path}")

    def interrupt(self, *_: object) -> None:
        self.interrupted = True
        if not self.showing:
            raise KeyboardInterrupt

    def on_step(self, task: TaskID) -> None:
        self.progress.advance(task)
        if self.interrupted:  # the handler's own exception was lost, e.g. in a destructor
            raise KeyboardInterrupt

    def enter_showing(self) -> None:
        """Ignore signals from now on: a launcher's second one must not stop the output of rows and errors."""
        self.showing = True
