"""Point-to-point operations with the signatures of ``torch.distributed``, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends import registry
from hvdbridge.backends.point_to_point import TAG_LIMIT, Messages
from hvdbridge.errors import ConfigurationError
from hvdbridge.training import groups, runtime
from hvdbridge.training.groups import Group, Handle, PointToPointHandle


def isend(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> Handle | None:
    """Start to send ``tensor``, of any dtype, to rank ``dst``. It must not change before the handle's ``wait()``.

    Raises:
        ConfigurationError: ``dst`` is this rank or outside of the group, or ``tag`` is out of range.
    """
    pg = groups.group_if_member(group, "isend")
    return None if pg is None else _isend(pg, tensor, dst, tag, group_dst)


def _isend(pg: Group, tensor: Tensor, dst: int | None, tag: int, group_dst: int | None = None) -> PointToPointHandle:
    data, destination = groups.dense(tensor, "send"), groups.find_rank(pg, dst, group_dst, "send")
    _check_peer(pg, destination, tag, "send to")
    label = f"{groups.describe_op('send', data, pg)} to rank {pg.ranks[destination]}, tag {tag}"
    return PointToPointHandle(_transport(pg).send(_payload(data), destination, tag), label, pg)


def irecv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> Handle | None:
    """Start to receive into ``tensor`` from rank ``src``; None: from any rank that sends with this tag.

    Raises:
        ConfigurationError: ``src`` is this rank or outside of the group, or ``tag`` is out of range. On Horovod and
            MPI, ``wait()`` raises it too, if the message has another size than ``tensor``.
    """
    pg = groups.group_if_member(group, "irecv")
    return None if pg is None else _irecv(pg, tensor, src, tag, group_src)


def _irecv(pg: Group, tensor: Tensor, src: int | None, tag: int, group_src: int | None = None) -> PointToPointHandle:
    data = groups.dense(tensor, "recv", written=True)
    source = None if src is None and group_src is None else groups.find_rank(pg, src, group_src, "recv")
    _check_peer(pg, source, tag, "receive from")
    sender = "any rank" if source is None else f"rank {pg.ranks[source]}"
    label = f"{groups.describe_op('recv', data, pg)} from {sender}, tag {tag}"
    direct = data.is_contiguous() and not data.is_cuda and data.numel() > 0
    payload = _payload(data) if direct else torch.empty(max(data.nbytes, 1), dtype=torch.uint8, device="cpu")

    def copy_payload() -> None:
        if not direct and data.numel():
            data.copy_(payload.view(data.dtype).view(data.shape))

    return PointToPointHandle(_transport(pg).receive(payload, source, tag), label, pg, copy_payload)


def send(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send as :func:`isend`, and wait: ``tensor`` may be changed afterwards."""
    if (pg := groups.group_if_member(group, "send")) is not None:
        _isend(pg, tensor, dst, tag, group_dst).wait()


def recv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive as :func:`irecv`, and wait. Return the sender's rank in the job; -1 on a rank outside of the group."""
    if (pg := groups.group_if_member(group, "recv")) is None:
        return -1
    handle = _irecv(pg, tensor, src, tag, group_src)
    handle.wait()
    return handle.source


@dataclass(eq=False)
class P2POp:
    """One operation of :func:`batch_isend_irecv`.

    Attributes:
        op: :func:`isend` or :func:`irecv`.
        tensor: the tensor to send, or to receive into.
        group: as in :func:`isend`; None: all ranks of the job.
        tag: as in :func:`isend`.
        peer, group_peer: the other rank, as a rank of the job or of the group; the user passes one of them.

    Raises:
        ConfigurationError: ``op`` is another function; or neither or both peers are given, or one outside of the group.
        Unsupported: ``tensor`` is not dense.
    """

    op: Callable[..., Handle | None]
    tensor: Tensor
    peer: int | None = None
    group: Group | None = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise ConfigurationError(f"P2POp: op={self.op!r} must be hvdbridge.isend or hvdbridge.irecv")
        groups.dense(self.tensor, "P2POp")
        group = groups.resolve_group(self.group, "P2POp")
        self.group_peer = groups.find_rank(group, self.peer, self.group_peer, "P2POp")
        self.peer = group.ranks[self.group_peer]


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Start all operations, and return their handles in order.

    Args:
        p2p_op_list: the operations. Those of a group without this rank are left out.
    """
    handles: list[Handle] = []
    for op in p2p_op_list:
        if (pg := groups.group_if_member(op.group, "batch_isend_irecv")) is not None:
            start = _isend if op.op is isend else _irecv
            handles.append(start(pg, op.tensor, op.peer, op.tag))
    return handles


def _check_peer(group: Group, peer: int | None, tag: int, action: str) -> None:
    if peer == group.rank():
        raise ConfigurationError(f"rank {runtime.rank()} cannot {action} itself")
    if not 0 <= tag < TAG_LIMIT:
        raise ConfigurationError(f"tag={tag} must be at least 0 and below {TAG_LIMIT}")


def _payload(data: Tensor) -> Tensor:
    """Return the tensor's bytes in host memory, flat, uint8; one byte for an empty tensor, as backends send none."""
    if not data.numel():
        return torch.zeros(1, dtype=torch.uint8, device="cpu")
    flat = data.cpu().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _transport(group: Group) -> Messages:
    if group._messages is None:
        session = runtime.current()
        # The session's own channel, since a new one needs all ranks. Its collectives and messages cannot be confused.
        communicator = session.communicator if group.number == 0 else groups.open_communicator(group, "send and recv")
        transport_class = registry.load(session.backend, "point_to_point")
        group._messages = transport_class(communicator, group.number, lambda: _tcp_exchange(group))
    return group._messages


def _tcp_exchange(group: Group) -> tuple[Any, list[int]]:
    state = groups.session_groups()
    if state.exchange is None:
        from hvdbridge.backends.tcp import Transport

        session = runtime.current()
        store, key = session.monitor, f"messages/{runtime.start_count}"
        state.exchange = Transport(
            session.world.rank,
            store.own_address(),
            lambda rank, text: store.store_set(f"{key}/{rank}", text.encode()),
            lambda rank: store.store_get(f"{key}/{rank}").decode(),
            session.config.ports,
        )
    return state.exchange, list(group.ranks)
