"""Blocking code as a flow: it runs in a thread of its own, and only while whoever drives the flow waits for it.

Rules:

1. One of the two runs at a time, so the code's requests come in the order of its lines: canonical where the code is.
2. Threads are used again: starting one costs more than handing over (some 30 us each way).
3. Gradient mode, CUDA device and stream belong to a thread: the code begins on the scheduler's. A callback of a future
   has a stream of its own: what it asks for waits for that, and it waits for the answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.errors import Unsupported
from hvdbridge.policy.collectives import Collective

T = TypeVar("T")

_here = threading.local()
_idle: list[_Fiber] = []


class _Fiber(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="fiber", daemon=True)
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any] | None, Any]] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.abandoned = False
        self.start()

    @torch.no_grad()
    def run(self) -> None:
        _here.fiber = self
        while not self.abandoned:
            function, stream = self.inbox.get()
            assert function is not None, "a fiber begins with a function"
            _enter(stream)
            try:
                ended = ("end", function())
            except BaseException as error:  # it belongs to whoever drives the flow
                ended = ("error", error)
            del function
            self.outbox.put(ended)
            del ended

    def ask(self, request: Collective) -> Tensor:
        own = _stream()
        self.outbox.put(("ask", (request, None if own is None else own.record_event())))
        error, (answer, stream) = self.inbox.get()
        if own is not None and stream is not None and own != stream:
            own.wait_stream(stream)
            if answer is not None and answer.is_cuda:
                answer.record_stream(own)
        if error is not None:
            error()
        return answer  # type: ignore[no-any-return]


def ask(request: Collective) -> Tensor:
    """Inside of :func:`flow_of`: let the scheduler answer ``request``.

    Raises:
        Unsupported: this thread is not one that a flow drives.
    """
    fiber: _Fiber | None = getattr(_here, "fiber", None)
    if fiber is None:
        raise Unsupported(
            f"{request.signature()}: a hook's collectives are issued in the thread that called the hook, so that their "
            "order is the same on all ranks. Do not issue them from a thread of your own."
        )
    return fiber.ask(request)


def flow_of(function: Callable[[], T]) -> Generator[Collective, Tensor, T]:
    """``function()`` as a flow that yields what it asks for by :func:`ask`.

    >>> from hvdbridge.policy.collectives import AllReduce
    >>> from hvdbridge.execution.scheduler import drive
    >>> drive(flow_of(lambda: ask(AllReduce(torch.ones(2))) + 1), lambda request: request.tensor * 4)
    tensor([5., 5.])
    """
    fiber = _idle.pop() if _idle else _Fiber()
    fiber.inbox.put((function, _stream()))
    try:
        while True:
            kind, value = fiber.outbox.get()
            if kind == "end":
                _idle.append(fiber)
                return value  # type: ignore[no-any-return]
            if kind == "error":
                _idle.append(fiber)
                raise value
            request, event = value
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            try:
                answer = yield request
            except Exception as error:
                fiber.inbox.put((_raising(error), (None, _stream())))
            else:
                fiber.inbox.put((None, (answer, _stream())))
            del value, request
    except GeneratorExit as end:
        fiber.abandoned = True
        fiber.inbox.put((_raising(end), (None, None)))
        raise


def _raising(error: BaseException) -> Callable[[], Any]:
    def throw() -> None:
        raise error

    return throw


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _enter(stream: Any) -> None:
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
