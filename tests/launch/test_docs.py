"""Every code block of the README and of docs/ does what its page says (``tests/pages.py`` has the rules).

``python -m pytest tests/launch/test_docs.py -k PAGE`` runs one page.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pages
import pytest


@pytest.mark.parametrize("page", pages.all_pages(), ids=pages.name)
def test_page(page: Path, tmp_path: Path) -> None:
    found = pages.blocks(page)
    if found and all(block.needs for block in found):
        pytest.skip(f"its blocks need {', '.join(sorted(set().union(*(block.needs for block in found))))}")
    pages.run(page, tmp_path)


@pytest.mark.recipes
@pytest.mark.parametrize("page", pages.needing("recipes"), ids=pages.name)
def test_page_of_recipes(page: Path, tmp_path: Path) -> None:
    pages.run(page, tmp_path, available={"recipes"}, seconds=180)


# -- the runner itself -----------------------------------------------------------------------------------

TRAIN = '```python title="train.py"\nfor i in range(2):\n    print(i)\n```\n'
CHECKED = "```console\n$ python train.py\n0\n1\n```\n"


def page_with(tmp_path: Path, text: str) -> tuple[Path, Path]:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text)
    folder.mkdir()
    return page, folder


GOOD = {
    "a script and its output": ("```python\nprint(sum(range(4)))\n```\n\n<!-- output -->\n```text\n6\n```\n", 2),
    "a file, and a command's output": (TRAIN + CHECKED, 2),
    "any text": (TRAIN + "```console\n$ python train.py\n...1\n```", 2),
    "a shell's state within a block": ("```bash\nexport A=1\ncd /\ntest $A = 1\n```", 1),
    "a file of another kind": ('```ini title="a/b.ini"\n[a]\n```\n```bash\ngrep a a/b.ini\n```', 2),
    "a change": (TRAIN + '```diff title="train.py"\n-for i in range(2):\n+for i in range(1):\n     print(i)\n@@\n'
                 "     print(i)\n+print(7)\n```\n" + CHECKED.replace("1", "7"), 3),
    "an indented block": ("- list\n\n    ```console\n    $ echo 1 \\\n    >   2\n    1 2\n    ```\n", 1),
    "a command that must fail": ('<!-- fails -->\n```console\n$ python -c "raise OSError(7)"\n...\nOSError: 7\n```', 1),
    "what needs more": ("<!-- needs: gpu, hosts -->\n```bash\nfalse\n```\n\n```yaml\na: 1\n```\n", 0),
    "a comment": ("<!-- a comment, of several words -->\n<!-- table: printed by `make demo` -->\ntext\n", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_what_passes(case: str, tmp_path: Path) -> None:
    text, ran = GOOD[case]
    assert pages.run(*page_with(tmp_path, text)) == ran


BAD = {
    "wrong output": (TRAIN + CHECKED.replace("1", "2"), r"page.md:6: the output is not the page's[^$]*0\n2[^$]*0\n1"),
    "wrong output of a script": ("```python\nprint(1)\n```\n<!-- output -->\n```text\n2\n```", "page.md:6: the output"),
    "wrong output of the first command": ("```console\n$ echo 1\n2\n$ echo 3\n3\n```", "page.md:2: the output"),
    "less output": (TRAIN + "```console\n$ python train.py\n0\n```", "page.md:6: the output"),
    "a command in bash": ("text\n```bash\ntrue\nls nowhere\ntrue\n```", r"page.md:4: ls nowhere\nexit status 2"),
    "a command in a console": ("```console\n$ true\n$ ls nowhere\n$ true\n```", r"page.md:3: ls nowhere\nexit stat"),
    "a script that raises": ("```python\nraise OSError(7)\n```", r"page.md:2: python\nexit status 1[^$]*OSError: 7"),
    "success of what must fail": ("<!-- fails -->\n```console\n$ true\n```", r"page.md:3: true\nshould fail"),
    "the wrong failure": ("<!-- fails -->\n```console\n$ false\n$ true\n```", r"page.md:3: false\nexit status 1"),
    "a diff of other text": (
        TRAIN + CHECKED + '```diff title="train.py"\n-for j in range(2):\n+pass\n```', "page.md:11: .*0 times"),
    "a diff at two places": (
        '```text title="a"\nx\nx\n```\n```diff title="a"\n-x\n+y\n```', "page.md:6: a has these lines 2 times"),
    "its second hunk": (
        '```text title="a"\nx\n```\n```diff title="a"\n-x\n+y\n@@\n-x\n+y\n```', "page.md:8: a has these.* 0 times"),
    "a diff of no file": ('```diff title="train.py"\n-a\n```', "page.md:2: no earlier block writes train.py"),
    "a diff without a file's lines": ('```text title="a"\nx\n```\n```diff title="a"\n+x\n```', "0 times"),
    "a diff that changes nothing": ('```text title="a"\nx\n```\n```diff title="a"\n x\n```', "page.md:5: .*nothing"),
    "a diff without a title": ("```diff\n-a\n```", "page.md:1?.*: a diff needs a title"),
    "an unknown need": ("<!-- needs: luck -->\n```bash\ntrue\n```", "needs: luck is none of"),
    "an unknown mark": ("<!-- wants: gpu -->\n```bash\ntrue\n```", "page.md:1: unknown mark"),
    "a mark of no block": ("<!-- needs: gpu -->\ntext\n", "page.md:2: the mark above"),
    "a mark at the end": ("<!-- needs: gpu -->\n", "page.md:1: the mark above"),
    "an unknown language": ("```sh\ntrue\n```", "page.md:1: ```sh is none of: python, bash"),
    "no language": ("```\ntrue\n```", "page.md:1: ``` is none of"),
    "an unknown option": ('```python linenums="1"\ntrue\n```', "page.md:1: .* is none of"),
    "no end": ("```bash\ntrue\n", "the block of line 1 has no end"),
    "a file that nothing runs": (TRAIN, "page.md:2: no later block runs or imports train.py"),
    "a file with an error": ('```python title="a.py"\nx = \n```\n```bash\npython a.py\n```', "does not compile"),
    "a console without a command": ("```console\nls\n```", "page.md:2: a console block begins with"),
    "a process that stays": ("```bash\nsleep 50 & true\n```", "processes that this block left"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_fails(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.forkserver, "GRACE_SECONDS", 0.5)
    text, message = BAD[case]
    with pytest.raises(pages.PageError, match=message):
        pages.run(*page_with(tmp_path, text))


def test_the_limit_ends_a_block(tmp_path: Path) -> None:
    page = page_with(tmp_path, "```bash\ntrue\nsleep 50\n```")
    with pytest.raises(pages.PageError, match=r"page.md:3: sleep 50\nwas ended after its block's limit of 1 s"):
        pages.run(*page, seconds=1)


def test_a_block_that_needs_more_runs_where_it_can(tmp_path: Path) -> None:
    text = '<!-- needs: slurm -->\n```console\n$ echo "$A" $HVDBRIDGE_POLICY\nb\n```\n'
    assert pages.run(*page_with(tmp_path, text), available={"slurm"}, env={"A": "b"}, real=True) == 1


def test_pages_are_found_by_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- needs: hosts, open-mpi -->\n```bash\ntrue\n```\n")
    (tmp_path / "docs" / "a.md").write_text("needs: open-mpi")
    assert [page.name for page in pages.all_pages()] == ["README.md", "a.md"]
    assert [page.name for page in pages.needing("open-mpi")] == ["README.md"]
    assert pages.needing("gpu") == []


JOB = """```python title="job.py"
import hvdbridge as hb

hb.init()
if hb.rank() == 0:
    print(hb.size(), hb.launcher(), flush=True)
hb.shutdown()
```
"""


@pytest.mark.parametrize("command", ["torchrun --standalone --nproc-per-node 2 job.py", "mpiexec -n 2 python job.py",
                                     "horovodrun -np 2 python job.py"])  # fmt: skip
def test_a_job_in_a_page(command: str, tmp_path: Path) -> None:
    prefix = "[0]<stdout>:" if command.startswith("horovodrun") else ""
    job = f"```console\n$ {command}\n{prefix}2 {command.split()[0]}\n```\n"
    assert pages.run(*page_with(tmp_path, JOB + job)) == 2
