"""Run the code blocks of a Markdown page, as a reader would: real processes in a folder of the page's own.

RULES

1. Blocks run in order. The folder is empty, apart from a link ``examples`` to the repository's folder of that name.
2. ``title="FILE"`` on a block of any language but diff writes that file. A titled ``diff`` changes it: in each hunk
   (``@@`` starts the next) the lines with ' ' and '-' must stand together exactly once in the file. A Python file that
   is written must compile, and a later block must name it.
3. ``python`` without a title is a script. ``bash`` runs under ``bash -e``. In ``console``, lines with ``$ `` are
   commands of one shell (``bash -e``), and lines below a command are its expected output, standard error included;
   ``...`` stands for any text. A command without lines below it may print anything. Colours and torchrun's warning
   about OMP_NUM_THREADS are left out of the output.
4. ``text``, ``ini`` and ``yaml`` do not run. ``<!-- output -->`` before ``text`` makes it the expected output of the
   block above it. ``<!-- fails -->`` before ``python`` or ``console`` means that the (last) command must fail.
5. ``<!-- needs: X -->`` before a block names what it needs beyond ``make test`` (:data:`NEEDS`). The block is left out
   unless ``available`` names all of it.
6. A fence with another language, an unknown mark, a mark without a block and a diff without a title are errors.
7. Each block has a limit of :data:`SECONDS`. No process of a block may remain when it has ended.

Blocks that need Slurm run from another test::

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
from dataclasses import dataclass
from pathlib import Path

import jobs

ROOT = Path(__file__).parents[1]
SECONDS = 60.0
NEEDS = {"slurm", "open-mpi", "intel-mpi", "recipes", "gpu", "hosts", "kubernetes", "network"}
RUN = ("python", "bash", "console")
LANGUAGES = (*RUN, "diff", "text", "ini", "yaml")
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,})(?P<info>.*)")
INFO = re.compile(r"(?P<language>[\w+-]*)(?: +title=\"(?P<title>[^\"/][^\"]*)\")?")
MARK = re.compile(r" *<!-- *(?P<mark>needs|fails|output)\b:? *(?P<value>.*?) *-->")
LIKE_A_MARK = re.compile(r" *<!-- *[\w-]+(: *[\w, -]+)? *-->")
OTHER_COMMENTS = re.compile(r" *<!-- *(table: |end of table|convergence: |generated)")
"""Comments that tools of this repository read."""
NOISE = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]|\r|^W\d{4} \S+ \d+ torch/distributed/run\.py:\d+\].*\n", re.MULTILINE)
"""Colours, and torchrun's warning that it sets OMP_NUM_THREADS, which every job under it prints."""
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

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.title is None


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


def needing(what: str) -> list[Path]:
    """Return the pages that have a block with the mark ``<!-- needs: what -->``."""
    assert what in NEEDS, what
    mark = re.compile(rf"<!-- *needs:[^>]*(?<![\w-]){what}(?![\w-])")
    return [page for page in all_pages() if mark.search(page.read_text())]


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
                raise wrong(f"unknown mark {line.strip()}; known: needs: {', '.join(sorted(NEEDS))}; fails; output")
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
            if needs - NEEDS:
                raise wrong(f"needs: {', '.join(needs - NEEDS)} is none of {', '.join(sorted(NEEDS))}")
            block = Block(
                language, info["title"], "\n".join(text) + "\n", first, needs, "fails" in marks, "output" in marks
            )
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
) -> int:
    """Run the blocks of ``page`` in ``folder``, except those that need more than ``available``.

    Args:
        path: folders to put in front of PATH.
        env: variables for the blocks, beside those of this process without ``HVDBRIDGE_*`` and ``OMP_NUM_THREADS``.
        real: start new interpreters; otherwise ``python`` and the launchers are forked (``forkserver.py``).
        seconds: limit of each block.

    Returns:
        The number of blocks that ran: scripts, commands, and files that were written or changed.

    Raises:
        PageError: a block is wrong or failed; the message has the page, line, command and output.
    """
    found = blocks(page)
    _check_files(page, found)
    (folder / "examples").symlink_to(ROOT / "examples")
    ran, before = 0, None
    for block in found:
        if not block.needs <= set(available):
            before = None
            continue
        if block.output:
            if before is not None:
                _compare(page, block.line, block.text, before)
        elif block.language == "diff":
            _apply(page, block, folder)
        elif block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.runs:
            before = _run(page, block, folder, path, env or {}, real, seconds).output
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


def _run(
    page: Path, block: Block, folder: Path, path: Sequence[str | Path], env: Mapping[str, str], real: bool,
    seconds: float,
) -> Result:  # fmt: skip
    """Run a block, and check its status and the output of its commands."""
    expected: list[tuple[int, str, str]] = []
    if block.language == "python":
        script = folder / f"_line{block.line}.py"
        script.write_text(block.text)
        text = f"exec python {script.name}\n"
    elif block.language == "console":
        expected = _commands(page, block)
        text = "exec 2>&1\n" + "".join(
            f"printf '{COMMAND}%s\\n' {i}\n{command}\n" for i, (_, command, _) in enumerate(expected)
        )
    else:
        text = block.text
    result = _shell(text, folder, path, env, real, seconds)
    outputs = result.output.split(COMMAND)[1:] if expected else [result.output]
    if expected:
        line, command, _ = expected[max(len(outputs) - 1, 0)]
    elif block.language == "bash":
        number, _, command = result.last.partition(" ")
        line = block.line + int(number or 1) - 1
    else:
        line, command = block.line, "python"
    where = f"{name(page)}:{line}: {command}"
    if result.status is None:
        raise PageError(f"{where}\nwas ended after its block's limit of {seconds:.0f} s\n{result.output[-4000:]}")
    last = not expected or len(outputs) == len(expected)
    if result.status and not (block.fails and last):
        raise PageError(f"{where}\nexit status {result.status} after {result.seconds:.1f} s\n{result.output[-4000:]}")
    if block.fails and not result.status:
        raise PageError(f"{where}\nshould fail, but did not\n{result.output[-4000:]}")
    for (line, _, want), got in zip(expected, outputs, strict=bool(expected)):
        if want:
            _compare(page, line, want, got.partition("\n")[2])
    return result


def _commands(page: Path, block: Block) -> list[tuple[int, str, str]]:
    """Return line, command and expected output of each command of a console block."""
    found: list[tuple[int, str, str]] = []
    continued = False
    for number, text in enumerate(block.text.splitlines(), block.line):
        if text.startswith("$ "):
            found.append((number, text[2:], ""))
        elif not found:
            raise PageError(f"{name(page)}:{number}: a console block begins with `$ ` and a command")
        elif continued:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{text.removeprefix('> ')}", "")
        else:
            line, command, want = found[-1]
            found[-1] = (line, command, f"{want}{text}\n")
        continued = not found[-1][2] and text.endswith("\\")
    return found


def _shell(
    text: str, folder: Path, path: Sequence[str | Path], env: Mapping[str, str], real: bool, seconds: float
) -> Result:
    with tempfile.TemporaryDirectory(prefix="hvdbridge-page-") as out:
        script, start, last = (Path(out) / name for name in ("block.sh", "start.sh", "last"))
        script.write_text(text)
        start.write_text(f"unset BASH_ENV\ntrap 'echo \"$LINENO $BASH_COMMAND\" >{shlex.quote(str(last))}' DEBUG\n")
        environ = {k: v for k, v in jobs.environment().items() if k != "OMP_NUM_THREADS"}
        environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        binaries = [*path, *([] if real else [jobs.forking()]), environ["PATH"]]
        environ |= {"PATH": os.pathsep.join(map(str, binaries)), "PWD": str(folder), "JOB_RECORDS": out, "TMPDIR": out}
        environ |= {"BASH_ENV": str(start), "CUDA_VISIBLE_DEVICES": "", **env}
        log, started = Path(out) / "log", time.monotonic()
        status, left = jobs.launch(["bash", "-e", str(script)], environ, log, seconds, folder)
        output = NOISE.sub("", log.read_text(errors="replace"))
        if left:
            status, output = 1, f"{output}\nprocesses that this block left: {left}"
        return Result(
            status, output, time.monotonic() - started, last.read_text().strip() if last.exists() else ""
        )


def _compare(page: Path, line: int, want: str, got: str) -> None:
    """Compare outputs without trailing blanks; ``...`` in ``want`` stands for any text."""
    want, got = ("\n".join(map(str.rstrip, text.rstrip().splitlines())) + "\n" for text in (want, got))
    if not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        raise PageError(f"{name(page)}:{line}: the output is not the page's\nexpected:\n{want}\ngot:\n{got[-4000:]}")
