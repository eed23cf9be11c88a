"""Messages between two ranks, with the signatures of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends import registry
from hvdbridge.backends.point_to_point import TAGS, Messages
from hvdbridge.errors import ConfigurationError
from hvdbridge.training import groups, runtime
from hvdbridge.training.groups import Group, Handle, Message


def isend(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> Handle | None:
    """Start to send ``tensor`` to rank ``dst``; any dtype. It stays as it is until the handle is waited for.

    Raises:
        ConfigurationError: ``dst`` is this rank, or not in the group; or the tag is out of range.
    """
    found = groups.member(group, "isend")
    return None if found is None else _isend(found, tensor, dst, tag, group_dst)


def _isend(found: Group, tensor: Tensor, dst: int | None, tag: int, group_dst: int | None = None) -> Message:
    data, to = groups.dense(tensor, "send"), groups.root_of(found, dst, group_dst, "send")
    _check_peer(found, to, tag, "send to")
    what = f"{groups.title('send', data, found)} to rank {found.ranks[to]}, tag {tag}"
    return Message(_messages(found).send(_payload(data), to, tag), what, found)


def irecv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> Handle | None:
    """Start to receive into ``tensor`` from rank ``src``; None: from any rank that sends with this tag.

    Raises:
        ConfigurationError: ``src`` is this rank, or not in the group; or the tag is out of range. From ``wait``, on
            Horovod and MPI: the message has another size.
    """
    found = groups.member(group, "irecv")
    return None if found is None else _irecv(found, tensor, src, tag, group_src)


def _irecv(found: Group, tensor: Tensor, src: int | None, tag: int, group_src: int | None = None) -> Message:
    data = groups.dense(tensor, "recv", written=True)
    source = None if src is None and group_src is None else groups.root_of(found, src, group_src, "recv")
    _check_peer(found, source, tag, "receive from")
    whom = "any rank" if source is None else f"rank {found.ranks[source]}"
    what = f"{groups.title('recv', data, found)} from {whom}, tag {tag}"
    direct = data.is_contiguous() and not data.is_cuda and data.numel() > 0
    payload = _payload(data) if direct else torch.empty(max(data.nbytes, 1), dtype=torch.uint8, device="cpu")

    def land() -> None:
        if not direct and data.numel():
            data.copy_(payload.view(data.dtype).view(data.shape))

    return Message(_messages(found).receive(payload, source, tag), what, found, land)


def send(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """:func:`isend`, waited for: ``tensor`` may be changed afterwards."""
    if (found := groups.member(group, "send")) is not None:
        _isend(found, tensor, dst, tag, group_dst).wait()


def recv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """:func:`irecv`, waited for; returns the rank that sent (-1 on a rank outside of the group)."""
    if (found := groups.member(group, "recv")) is None:
        return -1
    handle = _irecv(found, tensor, src, tag, group_src)
    handle.wait()
    return handle.source


@dataclass(eq=False)
class P2POp:
    """One operation of :func:`batch_isend_irecv`.

    Attributes:
        op: :func:`isend` or :func:`irecv`.
        peer, group_peer: the other rank, by its number in the job or in the group: one of the two.

    Raises:
        ConfigurationError: another ``op``; no peer, both, or one that is not in the group.
        Unsupported: ``tensor`` is not a dense tensor.
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
        group = groups.meant(self.group, "P2POp")
        self.group_peer = groups.root_of(group, self.peer, self.group_peer, "P2POp")
        self.peer = group.ranks[self.group_peer]


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Start all of them; returns their handles, in order."""
    handles: list[Handle] = []
    for each in p2p_op_list:
        if (found := groups.member(each.group, "batch_isend_irecv")) is not None:
            start = _isend if each.op is isend else _irecv
            handles.append(start(found, each.tensor, each.peer, each.tag))
    return handles


def _check_peer(group: Group, peer: int | None, tag: int, what: str) -> None:
    if peer == group.rank():
        raise ConfigurationError(f"rank {runtime.rank()} cannot {what} itself")
    if not 0 <= tag < TAGS:
        raise ConfigurationError(f"tag={tag} must be at least 0 and below {TAGS}")


def _payload(data: Tensor) -> Tensor:
    """The tensor's bytes on the host, flat; a single byte for an empty tensor, since a message needs one."""
    if not data.numel():
        return torch.zeros(1, dtype=torch.uint8, device="cpu")
    flat = data.cpu().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _messages(group: Group) -> Messages:
    if group._messages is None:
        session = runtime.current()
        # The session's own channel: making another one would need all ranks. Collectives on it meet no messages.
        communicator = session.communicator if group.number == 0 else groups.still_open(group, "send and recv")
        carrier = registry.load(session.backend, "point_to_point")
        group._messages = carrier(communicator, group.number, lambda: _tcp(group))
    return group._messages


def _tcp(group: Group) -> tuple[Any, list[int]]:
    opened = groups.opened()
    if opened.exchange is None:
        from hvdbridge.backends.tcp import Exchange

        session = runtime.current()
        store, key = session.monitor, f"messages/{runtime._starts}"
        opened.exchange = Exchange(
            session.world.rank,
            store.own_address(),
            lambda rank, text: store.store_set(f"{key}/{rank}", text.encode()),
            lambda rank: store.store_get(f"{key}/{rank}").decode(),
            session.config.ports,
        )
    return opened.exchange, list(group.ranks)
