"""Run the code blocks of a Markdown page, as a reader would: real processes in a folder of the page's own.

RULES

1. Blocks run in order, as in one terminal: a block of commands begins in the directory and with the exported variables
   that the one before it left, and files are written to that directory. The folder in which a page begins has links to
   the repository's ``examples`` and ``benchmarks``.
2. ``title="FILE"`` on a block of any language but diff writes that file. A titled ``diff`` changes it: in each hunk
   (``@@`` starts the next) the lines with ' ' and '-' must stand together exactly once in the file. A Python file that
   is written must compile, and a later block must name it.
3. ``python`` without a title is a script. ``bash`` runs under ``bash -e``. In ``console``, lines with ``$ `` are
   commands of one shell (``bash -e``), and lines below a command are its expected output, standard error included;
   ``...`` stands for any text. A command without lines below it may print anything. Colours and torchrun's warning
   about OMP_NUM_THREADS are left out of the output.
4. ``text``, ``ini`` and ``yaml`` do not run. ``<!-- output -->`` before ``text`` makes it the expected output of the
   block above it. ``<!-- fails -->`` before ``python`` or ``console`` means that the (last) command must fail.
5. ``<!-- needs: X -->`` before a block names what it needs beyond one host and minutes (:data:`NEEDS`). The block is
   left out unless ``available`` names all of it. In a ``console`` block ``node1$ `` begins a command on that host
   (``enter``); the hosts of a block run at the same time, each in a shell of its own.
6. A line of ``text`` or ``ini`` that begins with a command (:data:`COMMANDS`) is an error: what can run is ``bash`` or
   ``console``. ``<!-- not run: REASON -->`` before a block is for what no test can run.
7. A fence with another language, an unknown mark, a mark without a block and a diff without a title are errors.
8. Each block has a limit of :data:`SECONDS`. No process of a block may remain when it has ended.

A need has a test that runs its pages, from :func:`needing`::

    @pytest.mark.parametrize("page", pages.needing("slurm"), ids=pages.name)
    def test_page(page: Path, tmp_path: Path) -> None:
        pages.run(page, tmp_path, available={"slurm"}, path=[slurm / "bin"], env={...}, real=True)
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import jobs

ROOT = Path(__file__).parents[1]
SECONDS = 120.0
NEEDS = {
    "slurm": "make test-launchers",
    "open-mpi": "make test-launchers",
    "intel-mpi": "make test-launchers",
    "recipes": "make test-recipes",
    "network": "make test-install",
    "hosts": "make test, as root",
    "gpu": "python -m pytest tests/launch/test_docs.py -k page_of_gpu, where torch finds a GPU",
    "kubernetes": "nothing: tests/launch/test_kubernetes.py checks the manifests",
}
"""What a block may need -> what runs it."""
RUN = ("python", "bash", "console")
LANGUAGES = (*RUN, "diff", "text", "ini", "yaml")
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,})(?P<info>.*)")
INFO = re.compile(r"(?P<language>[\w+-]*)(?: +title=\"(?P<title>[^\"/][^\"]*)\")?")
MARK = re.compile(r" *<!-- *(?P<mark>needs|fails|output|not run)\b:? *(?P<value>.*?) *-->")
LIKE_A_MARK = re.compile(r" *<!-- *[\w-]+(: *[\w, -]+)? *-->")
OTHER_COMMENTS = re.compile(r" *<!-- *(table: |end of table|convergence: |generated)")
"""Comments that tools of this repository read."""
NOISE = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]|\r|^W\d{4} \S+ \d+ torch/distributed/run\.py:\d+\].*\n", re.MULTILINE)
"""Colours, and torchrun's warning that it sets OMP_NUM_THREADS, which every job under it prints."""
COMMANDS = re.compile(
    r"(\$ +)?(\w+=\S+ +)*(python3?|pip3?|torchrun|mpiexec|mpirun|horovodrun|srun|sbatch|salloc|hvdbridge|make|git|sudo"
    r"|apt|apt-get|bash|cd|source|export|kubectl)( .*)?"
)
PROMPT = re.compile(r"(?P<host>node\d+)?\$ (?P<command>.*)")
COMMAND = "\x1e"
"""Printed before each command of a console block."""


class PageError(AssertionError):
    """A block that is wrong, or that did not do what the page says."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its text without the fences, and the number of its first line in the page."""

    language: str
    title: str | None
    text: str
    line: int
    needs: frozenset[str] = frozenset()
    fails: bool = False
    output: bool = False
    not_run: bool = False

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.title is None and not self.not_run


@dataclass
class Terminal:
    """Where blocks run. A block changes ``folder`` and ``environ``."""

    folder: Path
    environ: dict[str, str]
    seconds: float
    enter: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command of a console block: the host of its prompt, its line in the page, and its expected output."""

    host: str | None
    line: int
    text: str
    want: str = ""


@dataclass(frozen=True)
class Result:
    status: int | None
    """None: the limit passed."""
    output: str
    seconds: float
    last: str
    """Line and text of the shell's last command."""


def name(page: Path) -> str:
    """Return the name of a page in tests' ids, which ``-k`` finds."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def needing(*what: str) -> list[Path]:
    """Return the pages that have a block which needs ``what``, no less and no more."""
    assert NEEDS.keys() >= set(what), what
    found = {page: re.findall(r"<!-- *needs: *(.*?) *-->", page.read_text()) for page in all_pages()}
    return [page for page, needs in found.items() if any(set(re.split(", *", need)) == set(what) for need in needs)]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page.

    Raises:
        PageError: an unknown language or mark, or a block that its rules do not allow.
    """
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    def wrong(text: str) -> PageError:
        return PageError(f"{name(page)}:{number}: {text}")

    marks: dict[str, str] = {}
    lines = enumerate(page.read_text().splitlines(), 1)
    for number, line in lines:
        if mark := MARK.fullmatch(line):
            marks[mark["mark"]] = mark["value"]
        elif (start := FENCE.fullmatch(line)) is None:
            if LIKE_A_MARK.fullmatch(line) and not OTHER_COMMENTS.match(line):
                known = f"needs: {', '.join(sorted(NEEDS))}; fails; output; not run: REASON"
                raise wrong(f"unknown mark {line.strip()}; known: {known}")
            if line.strip() and marks:
                raise wrong(f"the mark above ({', '.join(marks)}) belongs to no block")
        else:
            info = INFO.fullmatch(start["info"].strip())
            language = info["language"] if info else ""
            if info is None or language not in LANGUAGES:
                raise wrong(f"```{start['info']} is none of: {', '.join(LANGUAGES)}, with or without title=\"FILE\"")
            first, text, indent = number + 1, [], len(start["indent"])
            for number, line in lines:  # noqa: B007  (`wrong` uses it)
                if line.strip() == start["fence"]:
                    break
                if line[:indent].strip():
                    raise wrong("this line is indented less than the fence of its block")
                text.append(line[indent:])
            else:
                raise wrong(f"the block of line {first - 1} has no end")
            needs = frozenset(re.split(", *", marks["needs"])) if "needs" in marks else frozenset()
            if unknown := needs - NEEDS.keys():
                raise wrong(f"needs: {', '.join(unknown)} is none of {', '.join(sorted(NEEDS))}")
            block = Block(
                language, info["title"], "\n".join(text) + "\n", first, needs, "fails" in marks, "output" in marks,
                "not run" in marks,
            )  # fmt: skip
            if block.not_run and not marks["not run"]:
                raise wrong("`not run` needs a reason: <!-- not run: REASON -->")
            if language in ("text", "ini") and not (block.title or block.output or block.not_run):
                for i, command in enumerate(text):
                    if COMMANDS.fullmatch(command.strip()):
                        number = first + i
                        raise wrong(f"a command in ```{language} does not run, use ```bash or ```console: {command}")
            if language == "diff" and block.title is None:
                raise wrong('a diff needs a title, the file that it changes: ```diff title="train.py"')
            if block.fails and not (block.runs and language != "bash"):
                raise wrong("`fails` is for python and console")
            if block.output and language != "text":
                raise wrong("`output` is for text")
            marks = {}
            yield block
    if marks:
        raise wrong(f"the mark above ({', '.join(marks)}) belongs to no block")


def run(
    page: Path,
    folder: Path,
    available: Collection[str] = (),
    path: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    real: bool = False,
    seconds: float = SECONDS,
    enter: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Run the blocks of ``page`` in ``folder``, except those that need more than ``available``.

    Args:
        path: folders to put in front of PATH.
        env: variables for the blocks, beside those of this process without ``HVDBRIDGE_*`` and ``OMP_NUM_THREADS``.
        real: start new interpreters; otherwise ``python`` and the launchers are forked (``forkserver.py``).
        seconds: limit of each block.
        enter: name of a host -> the command that runs a shell command there, for blocks that need hosts.

    Returns:
        The number of blocks that ran: scripts, commands, and files that were written or changed.

    Raises:
        PageError: a block is wrong or failed; the message has the page, line, command and output.
    """
    found = blocks(page)
    _check_files(page, found)
    for link in ("examples", "benchmarks"):
        if not (folder / link).exists():
            (folder / link).symlink_to(ROOT / link)
    terminal = Terminal(folder, _environment(folder, path, env or {}, real), seconds, enter or {})
    ran, before = 0, None
    for block in found:
        if not block.needs <= set(available):
            before = None
            continue
        if block.output:
            if before is not None:
                _compare(page, block.line, block.text, before)
        elif block.language == "diff":
            _apply(page, block, terminal.folder)
        elif block.title:
            file = terminal.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.runs:
            before = _run(page, block, terminal)
        else:
            continue
        ran += 1
    return ran


def _check_files(page: Path, found: list[Block]) -> None:
    for i, block in enumerate(found):
        if block.language == "python" and block.title:
            where = f"{name(page)}:{block.line}"
            try:
                compile(block.text, where, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise PageError(f"{where}: {block.title} does not compile: {error}") from error
            stem = rf"\b{re.escape(Path(block.title).stem)}\b"
            code = (later.text for later in found[i + 1 :] if later.language in RUN)
            if not any(re.search(stem, text) for text in code):
                raise PageError(f"{where}: no later block runs or imports {block.title}")


def _apply(page: Path, block: Block, folder: Path) -> None:
    """Apply a diff, hunk by hunk."""
    assert block.title is not None
    target = folder / block.title
    if not target.exists():
        raise PageError(f"{name(page)}:{block.line}: no earlier block writes {block.title}")
    lines = target.read_text().splitlines()
    number, hunk = block.line, list[str]()
    for line in [*block.text.splitlines(), "@@"]:
        if line.startswith(("--- ", "+++ ")) and not hunk and number < block.line + 2:
            pass
        elif line.startswith("@@"):
            if hunk:
                lines = _patched(lines, hunk, f"{name(page)}:{number - len(hunk)}: {block.title}")
            hunk = []
        elif line[:1] not in ("", " ", "+", "-"):
            raise PageError(f"{name(page)}:{number}: a line of a diff begins with ' ', '+', '-' or '@@': {line}")
        else:
            hunk.append(line or " ")
        number += 1
    target.write_text("\n".join(lines) + "\n")


def _patched(lines: list[str], hunk: list[str], where: str) -> list[str]:
    old = [line[1:] for line in hunk if line[0] in " -"]
    new = [line[1:] for line in hunk if line[0] in " +"]
    places = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old] if old else []
    if len(places) != 1:
        text = "\n".join(old) or "(no line of the file in this hunk)"
        raise PageError(f"{where} has these lines {len(places)} times, not once:\n{text}")
    if old == new:
        raise PageError(f"{where}: this hunk changes nothing")
    return lines[: places[0]] + new + lines[places[0] + len(old) :]


def _environment(folder: Path, path: Sequence[str | Path], env: Mapping[str, str], real: bool) -> dict[str, str]:
    """Return the variables with which a page begins."""
    environ = {k: v for k, v in jobs.environment().items() if k != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    binaries = [*path, *([] if real else [jobs.forking()]), environ["PATH"]]
    fixed = {"PATH": os.pathsep.join(map(str, binaries)), "PWD": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    return environ | fixed | dict(env)


def _run(page: Path, block: Block, terminal: Terminal) -> str:
    """Run a block, check its status and the output of its commands, and return the output."""
    if block.language != "console":
        return _run_shell(page, block, terminal, None, [])
    commands = _commands(page, block)
    hosts = list(dict.fromkeys(command.host for command in commands))
    with ThreadPoolExecutor() as pool:
        shells = [
            pool.submit(_run_shell, page, block, terminal, host, [c for c in commands if c.host == host])
            for host in hosts
        ]
        return "".join(shell.result() for shell in shells)


def _run_shell(page: Path, block: Block, terminal: Terminal, host: str | None, commands: Sequence[Command]) -> str:
    """Run a script, a block of bash, or the commands that a console block has for one host."""
    if host not in (None, *terminal.enter):
        raise PageError(f"{name(page)}:{commands[0].line}: {host} is a host of blocks with <!-- needs: hosts -->")
    if block.language == "python":
        script = terminal.folder / f"_line{block.line}.py"
        script.write_text(block.text)
        text = f"exec python {script.name}\n"
    elif block.language == "console":
        text = "exec 2>&1\n" + "".join(
            f"printf '{COMMAND}%s\\n' {i}\n{command.text}\n" for i, command in enumerate(commands)
        )
    else:
        text = block.text
    result = _shell(text, terminal, host)
    outputs = result.output.split(COMMAND)[1:] if commands else [result.output]
    if commands:
        last = commands[max(len(outputs) - 1, 0)]
        line, shown = last.line, last.text
    elif block.language == "bash":
        number, _, shown = result.last.partition(" ")
        line = block.line + int(number or 1) - 1
    else:
        line, shown = block.line, "python"
    where = f"{name(page)}:{line}: {shown}"
    if result.status is None:
        limit = f"its block's limit of {terminal.seconds:.0f} s"
        raise PageError(f"{where}\nwas ended after {limit}\n{result.output[-4000:]}")
    complete = not commands or len(outputs) == len(commands)
    if result.status and not (block.fails and complete):
        raise PageError(f"{where}\nexit status {result.status} after {result.seconds:.1f} s\n{result.output[-4000:]}")
    if block.fails and not result.status:
        raise PageError(f"{where}\nshould fail, but did not\n{result.output[-4000:]}")
    for command, got in zip(commands, outputs, strict=bool(commands)):
        if command.want:
            _compare(page, command.line, command.want, got.partition("\n")[2])
    return result.output


def _commands(page: Path, block: Block) -> list[Command]:
    """Return the commands of a console block."""
    found: list[Command] = []
    continued = False
    for number, text in enumerate(block.text.splitlines(), block.line):
        if prompt := PROMPT.fullmatch(text):
            found.append(Command(prompt["host"], number, prompt["command"]))
        elif not found:
            raise PageError(f"{name(page)}:{number}: a console block begins with `$ ` and a command")
        elif continued:
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n{text.removeprefix('> ')}")
        else:
            found[-1] = replace(found[-1], want=f"{found[-1].want}{text}\n")
        continued = not found[-1].want and text.endswith("\\")
    return found


def _shell(text: str, terminal: Terminal, host: str | None) -> Result:
    """Run a script of bash. If it ends well, its directory and the variables that it changed become the terminal's."""
    with tempfile.TemporaryDirectory(prefix="hvdbridge-page-") as out:
        script, start, last = (Path(out) / name for name in ("block.sh", "start.sh", "last"))
        before, after = Path(out) / "before", Path(out) / "after"
        script.write_text(f"{text}\n/usr/bin/env -0 >{shlex.quote(str(after))}\n")
        begin = f"unset BASH_ENV\n/usr/bin/env -0 >{shlex.quote(str(before))}\n"
        start.write_text(f"{begin}trap 'echo \"$LINENO $BASH_COMMAND\" >{shlex.quote(str(last))}' DEBUG\n")
        environ = terminal.environ | {"JOB_RECORDS": out, "TMPDIR": out, "BASH_ENV": str(start)}
        log, started = Path(out) / "log", time.monotonic()
        argv = [*terminal.enter[host], f"bash -e {script}"] if host else ["bash", "-e", str(script)]
        status, left = jobs.launch(argv, environ, log, terminal.seconds, terminal.folder)
        output = NOISE.sub("", log.read_text(errors="replace"))
        if left:
            status, output = 1, f"{output}\nprocesses that this block left: {left}"
        if after.exists() and host is None:
            old, new = (
                dict(pair.split("=", 1) for pair in file.read_text().split("\0") if pair) for file in (before, after)
            )
            kept = {k: v for k, v in terminal.environ.items() if k not in old.keys() - new.keys()}
            terminal.environ = kept | {k: v for k, v in new.items() if old.get(k) != v}
            terminal.folder = Path(new["PWD"])
        return Result(
            status, output, time.monotonic() - started, last.read_text().strip() if last.exists() else ""
        )


def _compare(page: Path, line: int, want: str, got: str) -> None:
    """Compare outputs without trailing blanks; ``...`` in ``want`` stands for any text."""
    want, got = ("\n".join(map(str.rstrip, text.rstrip().splitlines())) + "\n" for text in (want, got))
    if not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        raise PageError(f"{name(page)}:{line}: the output is not the page's\nexpected:\n{want}\ngot:\n{got[-4000:]}")
