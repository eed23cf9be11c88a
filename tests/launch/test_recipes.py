"""The recipes of docs/how-to/frameworks.md give plain DDP's bits on two ranks, with the real packages."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.recipes

RECIPES = str(Path(__file__).parent / "scripts" / "recipes.py")


@pytest.mark.parametrize("package", ["Lightning", "Accelerate", "Trainer"])
def test_a_policy_in_their_ddp(package: str) -> None:
    """``mean`` equals plain DDP; another policy differs, which shows that the package calls the hook."""
    first, second = jobs.run("torchrun", None, 2, [RECIPES, package]).check().records
    assert first == second
    assert first.pop("plain") == first["mean"] != first["ef(bf16)"]
    for name, digest in first.items():
        assert digest == first[name.partition(" by ")[0]], name


def test_actors_of_ray() -> None:
    ddp, _ = jobs.run("torchrun", None, 2, [RECIPES, "DDP"]).check().records
    # Ray's services and workers take long to start on busy cores.
    first, second = jobs.run(None, None, 2, [RECIPES, "Ray"], timeout=180).check().records
    assert first == second
    assert first["mean"] == ddp["plain"] != first["ef(bf16)"]
