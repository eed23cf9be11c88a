"""What scripts import from ``horovod.common.util``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hvdbridge.torch import basics

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
        reduce_ops: what has ``Average`` and ``Sum``.
    """

    def chosen(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if average is not None:
            text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return chosen


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> Any:
    """As ``hvd.mpi_built()``; so are the next four."""
    return _asked("mpi_built")


def gloo_built(verbose: bool = False) -> Any:
    return _asked("gloo_built")


def nccl_built(verbose: bool = False) -> Any:
    return _asked("nccl_built")


def ddl_built(verbose: bool = False) -> Any:
    return _asked("ddl_built")


def ccl_built(verbose: bool = False) -> Any:
    return _asked("ccl_built")


def _asked(name: str) -> Any:
    return getattr(basics, name)()


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
    return [list(items[ends[i] : ends[i + 1]]) for i in range(parts)]


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")
