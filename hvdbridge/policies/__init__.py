"""The registry of policies: a name -> a class, imported on first use.

Rules:

1. A built-in policy is one entry of :data:`BUILT_IN`, sorted by name; no name can be taken twice.
2. A user's policy joins by :func:`register`, or from an installed package by the entry-point group
   ``hvdbridge.policies`` (``agreement = my_package.policies:Agreement``).
3. The built-in classes are attributes of this module, too: ``hvdbridge.policies.Mean``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import Tensor

from hvdbridge.errors import ConfigurationError, nearest
from hvdbridge.policy import spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.dry_run import Asked, dry_run

BUILT_IN = {
    "adasum": "adasum:Adasum", "adasum_delta": "adasum:AdasumDelta", "bf16": "dense:Bf16", "clip": "wrappers:Clip",
    "clipped_mean": "robust:ClippedMean", "delayed": "delayed:Delayed", "dgc": "dgc:Dgc", "diloco": "local:DiLoCo",
    "dp": "private:DifferentiallyPrivate", "ef": "wrappers:ErrorFeedback", "efsign": "sign:EfSign",
    "fp16": "dense:Fp16", "fp8": "quantised:Fp8", "geometric_median": "robust:GeometricMedian",
    "hierarchical": "hierarchical:Hierarchical", "int4": "quantised:Int4", "int8": "quantised:Int8",
    "krum": "robust:Krum", "local_sgd": "local:LocalSgd", "mean": "dense:Mean", "median": "robust:Median",
    "multi_krum": "robust:MultiKrum", "natural": "stochastic:Natural", "noop": "dense:Noop",
    "oktopk": "oktopk:OkTopK", "onebit": "sign:OneBit", "partition": "wrappers:Partition",
    "post_local_sgd": "local:PostLocalSgd", "powersgd": "low_rank:PowerSGD", "qsgd": "stochastic:Qsgd",
    "randomk": "sparse:RandomK", "sign": "sign:Sign", "sum": "dense:Sum", "terngrad": "stochastic:TernGrad",
    "threshold": "sparse:Threshold", "topk": "sparse:TopK", "trimmed_mean": "robust:TrimmedMean",
    "warmup": "wrappers:Warmup",
}  # fmt: skip
ENTRY_POINTS = "hvdbridge.policies"

_registered: dict[str, type[Policy]] = {}


def from_spec(text: str | Policy) -> Policy:
    """The policy that a spec string describes; a policy is returned as it is. The grammar is that of
    :mod:`hvdbridge.policy.spec`.

    Raises:
        SpecError: the text does not parse; the message marks the position and names what is known.

    >>> from_spec("warmup(steps=100, then=fp16(mean))")
    Warmup(then=Fp16(inner=Mean(exact=False)), steps=100, first=Mean(exact=False))
    """
    return text if isinstance(text, Policy) else spec.parse(text, lookup)


def to_spec(policy: Policy) -> str:
    """The shortest spec string of ``policy``: ``from_spec(to_spec(policy)) == policy``.

    Raises:
        ConfigurationError: a policy class in it is not registered.

    >>> to_spec(from_spec("mean( exact = true )")), to_spec(from_spec("ef:inner=bf16"))
    ('mean:exact=true', 'ef(bf16)')
    """
    return spec.unparse(policy, name_of)


def label(policy: Policy) -> str:
    """By what ranks and checkpoints compare policies: the spec, or where a class has no name what it prints as."""
    try:
        return to_spec(policy)
    except ConfigurationError:
        return repr(policy) if is_dataclass(policy) else type(policy).__qualname__


def register(name: str, cls: type[Policy]) -> type[Policy]:
    """Give ``cls`` a name that specs can use; returns ``cls``. Harmless when repeated.

    Raises:
        ConfigurationError: the name is no lower-case identifier, or belongs to another class.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(f"{name!r} cannot name a policy: use lower-case letters, digits and _")
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ConfigurationError(f"{cls!r} cannot be registered as {name!r}: it is no subclass of Policy")
    taken = BUILT_IN.get(name) or (_registered.get(name, cls) is not cls and _registered[name].__qualname__)
    if taken:
        raise ConfigurationError(f"the name {name!r} is taken by {taken}; choose another")
    _registered[name] = cls
    return cls


def known() -> list[str]:
    """All names, sorted."""
    return sorted({*BUILT_IN, *_registered, *_installed()})


def lookup(name: str) -> type[Policy]:
    """The class of that name.

    Raises:
        ConfigurationError: no such name; lists the known ones and suggests the nearest.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        cls: type[Policy] = getattr(import_module(f"{__name__}.{module}"), attribute)
        return cls
    if name not in _registered and name in _installed():
        register(name, _installed()[name].load())
    if name not in _registered:
        raise ConfigurationError(f"unknown policy {name!r}. {nearest(name, known())}")
    return _registered[name]


def name_of(cls: type[Policy]) -> str:
    """The name of a policy class.

    Raises:
        ConfigurationError: it has none.
    """
    for name, path in BUILT_IN.items():
        module, _, attribute = path.partition(":")
        if (cls.__module__, cls.__qualname__) == (f"{__name__}.{module}", attribute):
            return name
    for name in known():
        if name not in BUILT_IN and lookup(name) is cls:
            return name
    raise ConfigurationError(f"{cls.__qualname__} has no name in specs: register(name, cls) gives it one")


def bytes_per_step(
    policy: Policy,
    params: Mapping[str, Tensor | Sequence[int]],
    size: int,
    step: int = 0,
    bucket_mb: float | None = None,
    local_size: int | None = None,
) -> int:
    """Bytes that rank 0 sends in one step, as :meth:`Collective.bytes_sent` counts them.

    Weights and other control messages are not among them. Other ranks send the same, or less where the last node is
    smaller. Buckets are cut as on Horovod and MPI. DDP's differ a little, and the bytes hardly. What
    :meth:`Policy.after_step` sends is included where it is due.

    Args:
        params: name -> parameter or shape (of float32).
        size: number of ranks.
        step: number of the step, for policies that change in the course of training.
        bucket_mb: size of a bucket in MiB; None: the policy's.
        local_size: ranks per node, in order; None: one node.

    Raises:
        ConfigurationError: an argument is not positive, or the policy is not defined for so many ranks.

    >>> [bytes_per_step(from_spec(spec), {"w": (1000, 1000)}, size=4) for spec in ("mean", "bf16")]
    [6000000, 3000000]
    """
    if bucket_mb is None:
        bucket_mb = import_module("hvdbridge.policies.dense").bucket_mb(policy)
    events = dry_run(policy, params, size, step, bucket_mb, local_size)
    return sum(event.request.bytes_sent(event.size) for event in events if isinstance(event, Asked))


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def __getattr__(attribute: str) -> Any:
    for name, path in BUILT_IN.items():
        if path.endswith(f":{attribute}"):
            return lookup(name)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
