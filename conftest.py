"""Every test leaves nothing behind (``leaks.py``)."""

from leaks import leaves_nothing, pytest_configure, pytest_sessionfinish  # noqa: F401  (a fixture, and hooks)
