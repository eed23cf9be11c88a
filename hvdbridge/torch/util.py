"""The counterpart of ``horovod.common.util``: functions that scripts import from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch

from hvdbridge.torch import basics
from hvdbridge.torch.asynchronous import handle_average_backwards_compatibility

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is supported; only ``"torch"`` is. ``verbose`` is ignored.

    >>> extension_available("torch"), extension_available("tensorflow")
    (True, False)
    """
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError for frameworks other than torch. The other arguments are ignored."""
    if ext_name not in ("horovod.torch", "hvdbridge.torch"):
        raise ImportError(f"{ext_name}: hvdbridge stands in for horovod.torch alone")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: hvdbridge is not built for a version of a framework."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return a function ``f(op, average)``, which returns the reduction that either argument selects.

    Args:
        reduce_ops: ignored; hvdbridge has one set of reductions.
    """
    return handle_average_backwards_compatibility


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch can use a GPU; False for other frameworks."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return ``hvd.mpi_built()``. The next four functions correspond to functions of ``hvd`` in the same way."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within the block; a variable with value None is not changed."""
    variables = {name: value for name, value in kwargs.items() if value is not None}
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is a power of two.

    >>> [n for n in range(10) if num_rank_is_power_2(n)]
    [1, 2, 4, 8]
    """
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split ``items`` into ``parts`` consecutive lists whose lengths differ by at most one, longer lists first.

    >>> split_list("abcde", 3)
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    short, longer = divmod(len(items), parts)
    ends = [short * i + min(i, longer) for i in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Return whether ``x`` defines ``__iter__`` or ``__getitem__``."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")
