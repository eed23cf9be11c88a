"""Blocking code as a flow: the code runs in a thread of its own, and only while the flow's driver waits for it.

Rules:

1. The code and the flow take turns. Requests come in the order of the code's lines, the same on all ranks.
2. Threads are used again, because starting a thread costs more than handing over to one.
3. Gradient mode, CUDA device and stream belong to a thread. The code begins on the scheduler's stream. A callback of
   a future runs on another stream: the scheduler's stream waits for it before the collective, and it waits for the
   answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.errors import Unsupported
from hvdbridge.policy.collectives import Collective

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]

_here = threading.local()
_idle: list[_Fiber] = []


class _Fiber(threading.Thread):
    """Runs one function at a time.

    Attributes:
        work: functions to run, each with the stream on which it begins.
        asked: what the function asks for, or its outcome at its end; with its stream.
        answers: outcomes of requests.
    """

    def __init__(self) -> None:
        super().__init__(name="fiber", daemon=True)
        self.work: SimpleQueue[tuple[Callable[[], Any], Any]] = SimpleQueue()
        self.asked: SimpleQueue[tuple[Collective | Outcome, Any]] = SimpleQueue()
        self.answers: SimpleQueue[Outcome] = SimpleQueue()
        self.abandoned = False
        self.start()

    @torch.no_grad()
    def run(self) -> None:
        _here.fiber = self
        while not self.abandoned:
            function, stream = self.work.get()
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            try:
                self.asked.put(((function(), None), stream))
            except BaseException as error:  # the flow raises it to its driver
                self.asked.put(((None, error), stream))
            del function


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
    fiber.asked.put((request, _stream()))
    del request  # a message, which the driver may free
    return _result(fiber.answers.get())  # type: ignore[no-any-return]


def flow_of(function: Callable[[], T]) -> Generator[Collective, Tensor, T]:
    """``function()`` as a flow that yields what the function asks for by :func:`ask`.

    >>> from hvdbridge.policy.collectives import AllReduce
    >>> from hvdbridge.execution.scheduler import drive
    >>> drive(flow_of(lambda: ask(AllReduce(torch.ones(2))) + 1), lambda request: request.tensor * 4)
    tensor([5., 5.])
    """
    fiber = _idle.pop() if _idle else _Fiber()
    fiber.work.put((function, _stream()))
    while True:
        request, stream = fiber.asked.get()
        if isinstance(request, tuple):
            _idle.append(fiber)
            return _result(request)  # type: ignore[no-any-return]
        current = _stream()
        if stream is not None and stream != current:
            current.wait_stream(stream)
        try:
            tensor = yield request
        except GeneratorExit as end:
            fiber.abandoned = True
            fiber.answers.put((None, end))
            raise
        except Exception as error:
            fiber.answers.put((None, error))
            continue
        finally:
            del request
        current = _stream()
        if stream is not None and stream != current:
            stream.wait_stream(current)
            if tensor.is_cuda:
                tensor.record_stream(stream)
        fiber.answers.put((tensor, None))
        del tensor


def _result(outcome: Outcome) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None

