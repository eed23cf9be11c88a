"""Save and load a policy's state, for synchronizers and communication hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.state_store import OnResize, resized
from hvdbridge.policies import label
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.replicate import on_host


def state_dict(aggregator: Aggregator, gather: bool = False) -> dict[str, Any]:
    """Return the policy's state as plain dicts of tensors, readable with ``torch.load(weights_only=True)``.

    ``gather=False``: this rank's. ``gather=True``: that of all ranks on the group's rank 0, else empty; collective.
    """
    aggregator.settle()
    local = {
        "policy": label(aggregator.policy),
        "size": aggregator.control.size,
        "nodes": list(aggregator.communicator.nodes),
        "step": aggregator.step,
        "loss_scale": aggregator.loss_scale,
        "state_scale": aggregator.state_scale,  # may differ from the loss scale, which is that of the next backward
        "state": aggregator.store.portable(),
    }
    if not gather:
        return local
    control, own_state = aggregator.control, on_host(local["state"])
    ranks = [own_state]  # on rank 0: the tensors of "state", which torch.save then writes once
    for rank in range(1, control.size):  # one at a time: ranks other than 0 hold only one state
        with control.watch(f"state_dict(gather=True), for the state of the group's rank {rank}"):
            state = control.broadcast_object(own_state, rank)
        if control.rank == 0:
            ranks.append(state)
    return local | {"state": own_state, "ranks": ranks} if control.rank == 0 else {}


def load_state_dict(aggregator: Aggregator, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
    """Load what :func:`state_dict` returned, of either form. Local, so call it on every rank.

    Args:
        on_resize: how to load a state of another number of ranks, see ``GradientSynchronizer.load_state_dict``.

    Raises:
        ConfigurationError: the state is malformed, or of another policy, other parameters or shapes, or of another
            number of ranks where ``on_resize`` does not allow it. Nothing is loaded.
    """
    numbers = check_saved(saved, label(aggregator.policy))
    size, nodes_now = aggregator.control.size, aggregator.communicator.nodes
    aggregator.settle()
    node_change = (saved["nodes"], nodes_now) if nodes_now and saved["nodes"] else None
    if "ranks" in saved:
        aggregator.store.load(saved["ranks"], aggregator.control.rank, size, on_resize, node_change)
    else:
        resize = numbers["size"] != size or (node_change is not None and aggregator.store.moves(*node_change))
        if resize and on_resize != "reset":
            raise resized(int(numbers["size"]), size)
        aggregator.store.load(saved["state"], on_resize=on_resize)
        if resize:
            aggregator.store.reset()
    aggregator.step = int(numbers["step"])
    aggregator.loss_scale, aggregator.state_scale = numbers["loss_scale"], numbers["state_scale"]


def check_saved(saved: Any, spec: str) -> dict[str, float]:
    """Check a saved state for the policy ``spec``, and return its numbers by key.

    Raises:
        ConfigurationError: it is of another policy, or not a result of :func:`state_dict`.
    """
    minimum = {"size": 1, "step": 0, "loss_scale": 0, "state_scale": 0}
    if not isinstance(saved, Mapping):
        raise ConfigurationError(f"a saved state is a dict, not of type {type(saved).__name__}")
    if not saved:
        raise ConfigurationError("the state is empty: state_dict(gather=True) is complete on rank 0 alone")
    if missing := [key for key in ("policy", *minimum, "nodes", "state") if key not in saved]:
        raise ConfigurationError(f"this is no state_dict() of a synchronizer or a hook: {', '.join(missing)} missing")
    if saved["policy"] != spec:
        raise ConfigurationError(
            f"the state is one of policy {saved['policy']!r}, this is {spec!r}. Construct this one with the state's "
            "policy, or do not load the state: the policy then starts anew."
        )
    for key, lower in minimum.items():
        value = saved[key]
        valid = isinstance(value, int | float) and lower <= value < float("inf")
        if not valid or (value == 0 and key.endswith("scale")) or (value % 1 and not key.endswith("scale")):
            raise ConfigurationError(f"the state has {key}={value!r}, which cannot be")
    if not isinstance(saved["nodes"], list) or len(saved["nodes"]) not in (0, saved["size"]):
        raise ConfigurationError(f"the state has nodes={saved['nodes']!r}, which is a list of one number per rank")
    if not isinstance(saved.get("ranks", []), list | tuple):
        raise ConfigurationError(f"the state has ranks of type {type(saved['ranks']).__name__}, which is a list")
    return {key: saved[key] for key in minimum}
