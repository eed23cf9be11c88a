"""What scripts import from ``horovod.common.util``."""

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
    """Whether there is a ``hvd`` for this framework: ``"torch"`` alone.

    >>> extension_available("torch"), extension_available("tensorflow")
    (True, False)
    """
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError for any framework but torch."""
    if ext_name not in ("horovod.torch", "hvdbridge.torch"):
        raise ImportError(f"{ext_name}: hvdbridge stands in for horovod.torch alone")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Does nothing: hvdbridge is not built for one version of a framework."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """``f(op, average)``: the reduction that a caller means who may give either, or neither.

    Args:
        reduce_ops: not used; hvdbridge has one set of reductions.
    """
    return handle_average_backwards_compatibility


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """As ``hvd.mpi_built()``; so are the next four."""
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
    """These environment variables within the block; None leaves one as it is."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` is a power of two.

    >>> [n for n in range(10) if num_rank_is_power_2(n)]
    [1, 2, 4, 8]
    """
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[list[T]]:
    """``items`` in ``parts`` runs whose lengths differ by one at most, longer ones first.

    >>> split_list("abcde", 3)
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    short, longer = divmod(len(items), parts)
    ends = [short * i + min(i, longer) for i in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")
