"""Every code block of the README and of docs/ does what its page says (``tests/pages.py`` has the rules).

``python -m pytest -m "not recipes and not network" tests/launch/test_docs.py -k PAGE`` runs one page. ``pages.NEEDS``
says what runs the blocks that need more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pages
import pytest
import torch

from benchmarks.hosts import Hosts, NoHosts
from benchmarks.hosts import hosts as make_hosts


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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with make_hosts(2, host_names=("node1", "node2")) as cluster:
            yield cluster
    except NoHosts as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("page", pages.needing("hosts"), ids=pages.name)
def test_page_of_hosts(page: Path, hosts: Hosts, tmp_path: Path) -> None:
    enter = {f"node{i}": [str(hosts.folder / "ssh"), address] for i, address in enumerate(hosts.addresses, 1)}
    # All hosts share one kernel. MPICH's UCX would detect that and bypass the network.
    env = {"UCX_TLS": "tcp,self"}
    pages.run(page, tmp_path, available={"hosts"}, path=[hosts.folder], env=env, enter=enter)


@pytest.mark.parametrize("page", pages.needing("gpu"), ids=pages.name)
def test_page_of_gpu(page: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    env = {"CUDA_VISIBLE_DEVICES": visible}
    pages.run(page, tmp_path, available={"gpu"}, env=env, real=True, seconds=600)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a user with a new home, who has Python, pip's settings, and nothing of this environment."""
    others = [f for f in os.environ["PATH"].split(os.pathsep) if Path(f).resolve() != jobs.BIN.resolve()]
    home = tmp_path_factory.mktemp("home")
    return {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "PATH": os.pathsep.join([f"{sys.base_prefix}/bin", *others]),
        "PYTHONPATH": "",
        "PIP_CONFIG_FILE": str(Path.home() / ".config" / "pip" / "pip.conf"),
    }


@pytest.mark.network
@pytest.mark.parametrize("page", pages.needing("network"), ids=pages.name)
def test_page_of_network(page: Path, user: dict[str, str], tmp_path: Path) -> None:
    """Each page begins with a clone of REPOSITORY; the README is read in one. Horovod is built once."""
    folder = tmp_path / "page"
    clone = ["git", "clone", "--quiet", "--no-hardlinks", str(pages.ROOT)]
    if page.name == "README.md":
        subprocess.run([*clone, str(folder)], check=True)
    else:
        subprocess.run([*clone, "--bare", str(folder / "REPOSITORY")], check=True)
    pages.run(page, folder, available={"network"}, env=user, real=True, seconds=3600)


def test_every_need_has_a_test() -> None:
    """Nothing runs the blocks for Kubernetes; ``test_kubernetes.py`` checks the manifests that they apply."""
    files = (pages.ROOT / "tests").glob("*/test_*.py")
    calls = re.findall(r'"page", pages\.needing\((.*?)\)', "\n".join(file.read_text() for file in files))
    available = [frozenset(re.findall(r'"(.*?)"', call)) for call in calls]
    assert frozenset().union(*available) == pages.NEEDS.keys() - {"kubernetes"}
    used = {block.needs: pages.name(page) for page in pages.all_pages() for block in pages.blocks(page)}
    used.pop(frozenset({"kubernetes"}), None)
    assert {page: needs for needs, page in used.items() if not any(needs <= has for has in available)} == {}


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
    "a terminal's state between blocks": (
        "```bash\nmkdir a\ncd a\nexport A='1\n2'\n```\n```text title=\"b\"\n1\n2\n```\n"
        '```bash\ndiff b <(echo "$A")\n```\n```python\nprint(open("../a/b").read())\n```', 4),
    "the repository's folders": ("```bash\ntest -f examples/demo.py -a -f benchmarks/hosts.py\n```", 1),
    "what cannot run": ("<!-- not run: it asks a question -->\n```bash\nfalse\n```\n"
                        "<!-- not run: it asks a question -->\n```text\n$ sudo true\n```\n", 0),
    "text like commands": ("```text\npythons are there\nmakes\nsource: a\n```\n<!-- output -->\n```text\ngit\n```", 1),
    "a file with commands": ('```text title="a"\nmake all\n```\n```bash\ngrep make a\n```', 2),
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
    "a command in text": ("```text\na\nA=1 B=2 torchrun x.py\n```", "page.md:3: a command in ```text does.* A=1"),
    "a command in ini": ("```ini\n$ make\n```", "page.md:2: a command in ```ini does not run"),
    "what does not run, without a reason": ("<!-- not run -->\n```bash\nfalse\n```", "`not run` needs a reason"),
    "a host without the mark": ("```console\nnode1$ true\n```", "page.md:2: node1 is a host of blocks with"),
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


def test_hosts_run_at_the_same_time(tmp_path: Path) -> None:
    """The first command of each host ends only if the other one's has begun."""
    both = "touch {}; until test -e {}; do sleep 0.01; done"
    block = f"node1$ {both.format(1, 2)}\nnode2$ {both.format(2, 1)}\n"
    block += "node1$ echo $HOST $A\nfirst 7\nnode2$ echo $HOST\nsecond\n"
    text = f"```bash\nexport A=7\n```\n<!-- needs: hosts -->\n```console\n{block}```\n"
    enter = {host: ["env", f"HOST={title}", "bash", "-c"] for host, title in (("node1", "first"), ("node2", "second"))}
    page, folder = page_with(tmp_path, text)
    assert pages.run(page, folder, available={"hosts"}, enter=enter) == 2
    page.write_text(text.replace("second", "first"))
    with pytest.raises(pages.PageError, match=r"page.md:10: the output is not the page's"):
        pages.run(page, tmp_path, available={"hosts"}, enter=enter)


def test_pages_are_found_by_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- needs: hosts, open-mpi -->\n```bash\ntrue\n```\n")
    (tmp_path / "docs" / "a.md").write_text("needs: gpu\n\n1. b\n\n    <!-- needs: open-mpi -->\n    ```bash\n")
    assert [page.name for page in pages.all_pages()] == ["README.md", "a.md"]
    assert [page.name for page in pages.needing("open-mpi")] == ["a.md"]
    assert [page.name for page in pages.needing("open-mpi", "hosts")] == ["README.md"]
    assert pages.needing("gpu") == pages.needing("hosts") == []


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
