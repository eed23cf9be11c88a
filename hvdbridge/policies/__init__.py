"""Registry that maps policy names to policy classes, which it imports on first use.

Rules:

1. Each built-in policy has one entry in :data:`BUILT_IN`, sorted by name. Names are unique.
2. Users add a policy by :func:`register`. An installed package adds one by the entry-point group
   ``hvdbridge.policies`` (``agreement = my_package.policies:Agreement``).
3. The built-in classes are also attributes of this module: ``hvdbridge.policies.Mean``.
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
    """Construct the policy that a spec string describes; return a policy unchanged.

    :mod:`hvdbridge.policy.spec` describes the grammar.

    Raises:
        SpecError: ``text`` does not parse; the message marks the position and lists the known names.

    >>> from_spec("warmup(steps=100, then=fp16(mean))")
    Warmup(then=Fp16(inner=Mean(exact=False)), steps=100, first=Mean(exact=False))
    """
    return text if isinstance(text, Policy) else spec.parse(text, lookup)


def to_spec(policy: Policy) -> str:
    """Return the shortest spec string of ``policy``, so that ``from_spec(to_spec(policy)) == policy``.

    Raises:
        ConfigurationError: the class of ``policy``, or of one of its inner policies, is not registered.

    >>> to_spec(from_spec("mean( exact = true )")), to_spec(from_spec("ef:inner=bf16"))
    ('mean:exact=true', 'ef(bf16)')
    """
    return spec.unparse(policy, name_of)


def label(policy: Policy) -> str:
    """Return the text by which ranks and checkpoints compare policies: the spec, or the ``repr`` of an unregistered
    dataclass, or the qualified name of another unregistered class."""
    try:
        return to_spec(policy)
    except ConfigurationError:
        return repr(policy) if is_dataclass(policy) else type(policy).__qualname__


def register(name: str, cls: type[Policy]) -> type[Policy]:
    """Register ``cls`` under a name that specs can use, and return ``cls``. Repeating a registration is harmless.

    Raises:
        ConfigurationError: ``name`` is no lower-case identifier or belongs to another class, or ``cls`` is no
            subclass of :class:`~hvdbridge.Policy`.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(f"{name!r} cannot name a policy: use lower-case letters, digits and _")
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ConfigurationError(f"{cls!r} cannot be registered as {name!r}: it is no subclass of Policy")
    entry = _installed().get(name)
    installed = entry.value if entry is not None and name not in _registered and entry.load() is not cls else ""
    registered = _registered.get(name, cls)
    taken = BUILT_IN.get(name) or installed or (registered is not cls and registered.__qualname__)
    if taken:
        raise ConfigurationError(f"the name {name!r} is taken by {taken}; choose another")
    _registered[name] = cls
    return cls


def known() -> list[str]:
    """Return the names of all built-in, registered and installed policies, sorted."""
    return sorted({*BUILT_IN, *_registered, *_installed()})


def lookup(name: str) -> type[Policy]:
    """Return the policy class registered under ``name``; import it if needed.

    Raises:
        ConfigurationError: the name is not known; the message lists the known names and suggests the nearest.
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
    """Return the name under which a policy class is registered.

    Raises:
        ConfigurationError: ``cls`` is not registered.
    """
    for name, path in BUILT_IN.items():
        module, _, attribute = path.partition(":")
        if (cls.__module__, cls.__qualname__) == (f"{__name__}.{module}", attribute):
            return name
    for name in sorted(_registered):
        if _registered[name] is cls:
            return name
    package = cls.__module__.partition(".")[0]
    for name, entry in sorted(_installed().items()):  # no other package is imported: it may be broken
        if entry.module.partition(".")[0] == package and lookup(name) is cls:
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
    """Return the bytes that rank 0 sends in one step, as :meth:`Collective.bytes_sent` counts them.

    The count includes the collectives of :meth:`Policy.after_step` in steps in which it runs. It excludes weights and
    other control messages. Other ranks send as many bytes, or fewer if the last node has fewer ranks than the others.
    Buckets are those of Horovod and MPI; DDP cuts slightly different buckets, with nearly the same total.

    Args:
        policy: the policy, as :func:`from_spec` returns it.
        params: parameters, or shapes (taken as float32), by name.
        size: number of ranks.
        step: number of the step, from 0; some policies change during training.
        bucket_mb: bucket size in MiB; None: the policy's default.
        local_size: ranks per node, assigned in rank order; None: all ranks on one node.

    Raises:
        ConfigurationError: an argument is not positive, or the policy is not defined for ``size`` ranks.

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
