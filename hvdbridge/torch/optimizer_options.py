"""What the arguments of ``hvd.DistributedOptimizer`` mean, and which are refused."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy
from hvdbridge.torch.basics import Adasum, Average
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.optimizer_reducer import OPS, Reduction
from hvdbridge.torch.process_sets import ProcessSet, global_process_set
from hvdbridge.training import runtime

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before step() or synchronize(). "
    "Pass a larger backward_passes_per_step to accumulate them."
)
TOO_EARLY = (
    "optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(): gradients are on "
    "their way to other ranks. Call it after one of these, or before loss.backward()."
)
TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): write "
    "'with optimizer.skip_synchronize(): optimizer.step()', which says that gradients are complete."
)
"""Begins as Horovod's warning, by which scripts filter it."""

REPLACED = (
    "another DistributedOptimizer over some of this one's parameters was made after it, and reduces them in its place. "
    "Use that, or give each optimizer parameters of its own."
)
ONE_WAY = "policy= stands in the place of op, compression and gradient_predivide_factor: give one"


def check_options(
    op: Any, predivide: float, passes: int, groups: Any, policy: object, process_set: ProcessSet, delta: bool
) -> None:
    """Refuse options without meaning.

    Args:
        delta: the optimizer combines steps, by Adasum.

    Raises:
        ValueError: an option, or two of them together, have no meaning.
        NotImplementedError: Adasum on a process set.
    """
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average: it splits that division in two")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if delta and process_set is not global_process_set:
        raise NotImplementedError("Adasum takes the global process set only")
    if delta and policy is not None:
        raise ValueError(ONE_WAY)
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups takes a number that is not negative, or a list of lists of parameters")
    members = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) for p in members):
        raise ValueError("groups: its lists hold parameters (torch.Tensor)")
    if len(set(members)) < len(members):
        raise ValueError("groups: a parameter can be in one group only")


def choose_policy(policy: str | Policy | None, op: Any, compression: Any, predivide: float) -> Policy:
    """The policy that these arguments, or the session, ask for."""
    if op != Adasum and op not in OPS:
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product")
    plain = op == Average and compression is Compression.none and predivide == 1.0
    if policy is not None:
        if not plain:
            raise ValueError(ONE_WAY)
        return from_spec(policy)
    default = from_spec(runtime.current().policy)
    if plain and label(default) != "mean":
        return default
    if label(default) != "mean":
        text = f"the policy {label(default)!r} is not used: the script asks for an op or a compression of its own"
        warnings.warn(text, stacklevel=3)
    return Reduction(op, compression, predivide)


def names_of(
    param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter.

    Raises:
        ValueError: not pairs, a name twice, or a parameter of the optimizer without a name.
    """
    numbered = {p: f"{i}.{j}" for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])}
    if named_parameters is None:
        return {p: f"allreduce.noname.{number}" for p, number in numbered.items()}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters takes tuples (name, parameter), as model.named_parameters() gives them")
    if twice := sorted(name for name, times in Counter(name for name, _ in named).items() if times > 1):
        raise ValueError(f"named_parameters: names must be unique, these occur twice: {', '.join(twice)}")
    found = {p: name for name, p in named}
    if missing := [number for p, number in numbered.items() if p not in found]:
        raise ValueError(
            f"named_parameters names no parameter for {len(missing)} of the optimizer's (group.index): "
            f"{', '.join(missing[:8])}. Pass the names of all, or none."
        )
    return found
