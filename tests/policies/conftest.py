"""``make quick`` runs what holds for every policy on one of each family; on the others it is marked ``slow``."""

from __future__ import annotations

import pytest

from policies.policies import CASES, OF_FAMILY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("case", CASES[0]) not in OF_FAMILY:
            item.add_marker(pytest.mark.slow)
