"""Every test leaves nothing behind (``leaks.py``); tests that share a job run in one worker."""

from __future__ import annotations

import pytest
from leaks import leaves_nothing, pytest_configure, pytest_sessionfinish  # noqa: F401  (a fixture, and hooks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs the tests of a file that share backend, size and launcher: they share a job, too."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        shared = [str(parameters[name]) for name in ("launcher", "backend", "size") if name in parameters]
        item.add_marker(pytest.mark.xdist_group("-".join([item.path.stem, *shared])))
