"""The reference's pages: the generated ones are those of today's code, and the API's names all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdbridge as hb
from hvdbridge.config import PREFIX, VARIABLES, Config

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = ["policies", "cli", "environment", "spec-grammar"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the pages that the generator writes, in a process of its own."""
    folder = tmp_path_factory.mktemp("reference")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); import generate; from pathlib import Path\n"
    code += f"for path, text in generate.pages().items(): Path({str(folder)!r}, path.name).write_text(text)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_that_of_the_code(page: str, made: Path) -> None:
    """If this fails, write the pages anew and commit them: ``python docs/generate.py``."""
    committed, now = (REFERENCE / f"{page}.md").read_text(), (made / f"{page}.md").read_text()
    assert committed == now, f"docs/reference/{page}.md differs from the code: run python docs/generate.py"


def test_no_generated_page_is_left_out(made: Path) -> None:
    assert sorted(path.stem for path in made.iterdir()) == sorted(PAGES)


@pytest.mark.parametrize("name", VARIABLES)
def test_the_defaults_of_variables_are_those_of_the_configuration(name: str) -> None:
    variable, default = VARIABLES[name], VARIABLES[name].default.strip("`")
    field = Config.__dataclass_fields__[variable.field or name.lower()].default
    if name == "START_SECONDS":
        given = Config.from_environment({f"{PREFIX}TIMEOUT_SECONDS": "7"})
        assert (default, given.start_seconds) == (f"{PREFIX}TIMEOUT_SECONDS", 7.0)
    elif field is None:  # the default depends on the job
        assert name in ("BUCKET_MB", "PORTS", "IFACE")
    elif name == "CACHE":
        assert default == str(field)
    else:
        assert variable.parse(name, default) == field


def test_the_api_page_has_every_public_name() -> None:
    described = re.findall(r"^::: hvdbridge\.(\S+)", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    assert len(described) == len(set(described))
    names = {target.rpartition(".")[2] for target in described}
    classes = {target.partition(":")[2] for target in hb.policies.BUILT_IN.values()}
    functions = {"from_spec", "to_spec", "register", "known", "lookup", "name_of", "label", "bytes_per_step"}
    assert names - {"policies"} == {*hb.__all__, *classes, *functions} - {"policies"}
