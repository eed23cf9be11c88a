"""Broadcasts of parameters, optimizer state and objects, made of the raw operations.

Rules:

1. The root sends a structure before the tensors that it describes. Nothing is inferred from the other ranks' state,
   which may be empty, older or of another shape.
2. Objects travel by ``cloudpickle`` where it is installed, else by ``pickle``.
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

from hvdbridge.torch.asynchronous import _number, _root, allgather_async, broadcast_async_, synchronize
from hvdbridge.torch.basics import _current, rank
from hvdbridge.torch.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy rank ``root_rank``'s values into ``params`` in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or lists of them. Values
            that are no tensors are left as they are.
        root_rank: a rank of the job.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``params`` is nothing of these; ``root_rank`` is not in the process set.
        HorovodInternalError: ranks have other names, shapes or dtypes.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
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
    """Give every rank the state and the options of rank ``root_rank``'s optimizer.

    If the root's optimizer has no state yet, every rank without state first makes a step with gradients of zero.
    Horovod does the same, so moved scripts give the same bits (Adam counts that step, and weight decay acts on it). If
    the root's optimizer has state, no rank steps: parameters that were broadcast before stay equal.

    Args:
        optimizer: an optimizer, wrapped by ``DistributedOptimizer`` or not.
        root_rank: a rank of the job.
        model: tells which parameters have sparse gradients.
        process_set: the ranks that take part.

    Raises:
        ValueError: LBFGS, as under Horovod; ``root_rank`` is not in the process set.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: use broadcast_object(optimizer.state_dict())")
    mine = optimizer.state_dict()
    fresh = broadcast_object(not mine["state"], root_rank, None, process_set)
    if fresh and not mine["state"]:
        _step_on_zeros(optimizer, model)
        mine = optimizer.state_dict()
    tensors: list[Tensor] = []
    structure = _replaced(mine, Tensor, partial(_taken_out, tensors)) if rank() == root_rank else None
    structure = broadcast_object(structure, root_rank, "broadcast_optimizer_state", process_set)
    devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    if rank() != root_rank:
        mine = _replaced(structure, _Place, partial(_filled_later, tensors, devices))
    handles = [
        broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if rank() != root_rank:
        optimizer.load_state_dict(mine)


def _step_on_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = [] if model is None else [m for m in model.modules() if getattr(m, "sparse", False)]
    sparse = {p for module in modules for p in module.parameters()}
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        p.grad = torch.zeros_like(p)
        if isinstance(optimizer, torch.optim.SparseAdam) or (isinstance(optimizer, torch.optim.SGD) and p in sparse):
            p.grad = p.grad.to_sparse()
    getattr(optimizer, "step_alone", optimizer.step)()  # a DistributedOptimizer's step() would be collective


@dataclass
class _Place:
    """In a structure, the place of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cuda: bool


def _taken_out(tensors: list[Tensor], tensor: Tensor) -> _Place:
    tensors.append(tensor.detach().contiguous())
    return _Place(tensor.dtype, tuple(tensor.shape), tensor.is_cuda)


def _filled_later(tensors: list[Tensor], devices: list[torch.device], place: _Place) -> Tensor:
    """A new tensor: on a GPU of this rank, if the root's tensor was on a GPU."""
    device = next((each for each in devices if each.type == "cuda"), None) if place.cuda else None
    tensors.append(torch.empty(place.shape, dtype=place.dtype, device=device))
    return tensors[-1]


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``replace`` was called for each object of a kind, in order."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, replace) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, kind, replace) for each in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank ``root_rank``'s object on every rank; there it is ``obj`` itself.

    Args:
        obj: what can be pickled; on other ranks it is not looked at.
        root_rank: a rank of the job.
        name: by which ranks match operations.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``root_rank`` is not in the process set; this rank is not.
        HorovodInternalError: ranks disagree about the root; another rank failed.
    """
    operations, root = _current(), _root("broadcast_object", root_rank, process_set)
    mine = _dump(obj) if operations.rank == root_rank else torch.empty(0, dtype=torch.uint8, device="cpu")
    pending = operations.submit("broadcast_object", name, [mine], process_set=_number(process_set), root=root)
    data = operations.wait(pending)
    return obj if operations.rank == root_rank else _load(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that broadcasts the object that it is given; see :func:`broadcast_object`."""
    return partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order; see :func:`broadcast_object`."""
    mine = _dump(obj)
    handle = allgather_async(mine, f"object.{name}" if name else None, process_set)
    length = torch.tensor([mine.numel()], device="cpu")
    lengths = allgather_async(length, f"object.{name}.length" if name else None, process_set)
    data = synchronize(handle)
    return [_load(part) for part in data.split(synchronize(lengths).tolist())]


def _dump(obj: Any) -> Tensor:
    pickler: Any = import_module("cloudpickle") if find_spec("cloudpickle") else pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def _load(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
