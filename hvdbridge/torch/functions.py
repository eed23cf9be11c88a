"""Broadcasts of parameters, optimizer state and objects, composed of raw operations.

Rules:

1. The root sends the structure of a state before its tensors. The other ranks' own state determines nothing, because
   it may be empty, older or of another shape.
2. Objects are serialized by ``cloudpickle`` if it is installed, else by ``pickle``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hvdbridge.torch.asynchronous import _checked_root, _process_set_id, allgather_async, broadcast_async_, synchronize
from hvdbridge.torch.basics import _current, rank
from hvdbridge.torch.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with the values of rank ``root_rank``, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of tensors or of
            pairs of name and tensor. Values other than tensors are ignored.
        root_rank: a rank of the job.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``params`` has another type; ``root_rank`` is not in the process set.
        HorovodInternalError: names, shapes or dtypes differ between ranks.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}: a state dict or (named) parameters are expected")
    tensors = [(name, value) for name, value in pairs if isinstance(value, Tensor)]
    for handle in [broadcast_async_(value, root_rank, name, process_set) for name, value in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Load the state and the options of rank ``root_rank``'s optimizer on every rank.

    If the root's optimizer has no state yet, every rank without state first makes a step with gradients of zero.
    Horovod does the same, so migrated scripts give the same bits (Adam counts that step, and weight decay acts on it).
    If the root's optimizer has state, no rank steps: parameters that were broadcast before stay equal.

    Args:
        optimizer: an optimizer, wrapped by ``DistributedOptimizer`` or not.
        root_rank: a rank of the job.
        model: its modules with ``sparse=True`` determine which of SGD's zero gradients are sparse.
        process_set: the ranks that take part.

    Raises:
        ValueError: LBFGS, as under Horovod; ``root_rank`` is not in the process set.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: use broadcast_object(optimizer.state_dict())")
    state = optimizer.state_dict()
    root_is_empty = broadcast_object(not state["state"], root_rank, None, process_set)
    if root_is_empty and not state["state"]:
        _step_on_zeros(optimizer, model)
        state = optimizer.state_dict()
    tensors: list[Tensor] = []
    structure = _map_instances(state, Tensor, partial(_extract_tensor, tensors)) if rank() == root_rank else None
    structure = broadcast_object(structure, root_rank, "broadcast_optimizer_state", process_set)
    devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    if rank() != root_rank:
        state = _map_instances(structure, _TensorSpec, partial(_allocate_tensor, tensors, devices))
    handles = [
        broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _step_on_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Create the optimizer's state by a step with gradients of zero, which stay in ``p.grad``."""
    modules = [] if model is None else [m for m in model.modules() if getattr(m, "sparse", False)]
    sparse = {p for module in modules for p in module.parameters()}
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        p.grad = torch.zeros_like(p)
        if isinstance(optimizer, torch.optim.SparseAdam) or (isinstance(optimizer, torch.optim.SGD) and p in sparse):
            p.grad = p.grad.to_sparse()
    getattr(optimizer, "step_alone", optimizer.step)()  # a DistributedOptimizer's step() would be collective


@dataclass
class _TensorSpec:
    """Stands for a tensor in a structure; ``cuda``: the tensor is on a GPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cuda: bool


def _extract_tensor(tensors: list[Tensor], tensor: Tensor) -> _TensorSpec:
    """Append ``tensor`` to ``tensors``, and return its description."""
    tensors.append(tensor.detach().contiguous())
    return _TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.is_cuda)


def _allocate_tensor(tensors: list[Tensor], devices: list[torch.device], spec: _TensorSpec) -> Tensor:
    """Append a new uninitialized tensor to ``tensors``, and return it. It is on a GPU if the root's tensor is."""
    gpu = next((device for device in devices if device.type == "cuda"), None) if spec.cuda else None
    tensors.append(torch.empty(spec.shape, dtype=spec.dtype, device=gpu))
    return tensors[-1]


def _map_instances(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Copy nested dicts, lists and tuples, with ``replace(x)`` for each ``x`` of type ``kind``, in order."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _map_instances(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_instances(item, kind, replace) for item in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank ``root_rank``'s object on every rank. The root returns ``obj`` itself.

    Args:
        obj: picklable object; ignored on other ranks.
        root_rank: a rank of the job.
        name: ranks match operations by it; None: a running number.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``root_rank`` or this rank is not in the process set.
        HorovodInternalError: ranks gave different roots; another rank failed.
    """
    operations, root = _current(), _checked_root("broadcast_object", root_rank, process_set)
    data = _dump(obj) if operations.rank == root_rank else torch.empty(0, dtype=torch.uint8, device="cpu")
    pending = operations.submit("broadcast_object", name, [data], process_set=_process_set_id(process_set), root=root)
    data = operations.wait(pending)
    return obj if operations.rank == root_rank else _load(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function ``f(obj)`` that calls :func:`broadcast_object` with these arguments."""
    return partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order; ``obj``, ``name`` and errors as in :func:`broadcast_object`."""
    data = _dump(obj)
    handle = allgather_async(data, f"object.{name}" if name else None, process_set)
    length = torch.tensor([data.numel()], device="cpu")
    lengths = allgather_async(length, f"object.{name}.length" if name else None, process_set)
    gathered = synchronize(handle)
    return [_load(pickled) for pickled in gathered.split(synchronize(lengths).tolist())]


def _dump(obj: Any) -> Tensor:
    """Serialize ``obj`` into a flat uint8 tensor on the CPU."""
    pickler: Any = import_module("cloudpickle") if find_spec("cloudpickle") else pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def _load(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
