"""Run blocking code as a flow: the code runs in a thread of its own (a fiber), in alternation with the scheduler.

Rules:

1. The code runs only while the thread that advances the flow waits for it. Requests are issued in program order, the
   same on all ranks.
2. Idle threads are kept for later flows, because starting a thread is slower than a hand-over to an idle one.
3. Gradient mode, CUDA device and stream are thread-local, so each fiber sets them. The code begins on the scheduler's
   stream. If it issues a request on another stream, as callbacks of futures do, the scheduler's stream waits for that
   stream before the collective, and that stream waits for the scheduler's afterwards.
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

_thread_local = threading.local()
_idle_fibers: list[_Fiber] = []


class _Fiber(threading.Thread):
    """A reusable thread that runs one function at a time.

    Attributes:
        work: functions to run, each with the CUDA stream on which it begins.
        requests: the running function's requests, and at its end its outcome, each with the current stream.
        results: the outcomes of its requests.
        abandoned: the flow was closed before the function ended; the thread then ends with the function.
    """

    def __init__(self) -> None:
        super().__init__(name="fiber", daemon=True)
        self.work: SimpleQueue[tuple[Callable[[], Any], Any]] = SimpleQueue()
        self.requests: SimpleQueue[tuple[Collective | Outcome, Any]] = SimpleQueue()
        self.results: SimpleQueue[Outcome] = SimpleQueue()
        self.abandoned = False
        self.start()

    @torch.no_grad()
    def run(self) -> None:
        _thread_local.fiber = self
        while not self.abandoned:
            function, stream = self.work.get()
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            try:
                self.requests.put(((function(), None), stream))
            except BaseException as error:  # the flow raises it again, in the thread that advances it
                self.requests.put(((None, error), stream))
            del function


def execute(request: Collective) -> Tensor:
    """Execute a collective from code that :func:`flow_of` runs, and return its result.

    Raises:
        Unsupported: the current thread is not that of a flow.
    """
    fiber: _Fiber | None = getattr(_thread_local, "fiber", None)
    if fiber is None:
        raise Unsupported(
            f"{request.signature()}: a hook's collectives are issued in the thread that called the hook, so that their "
            "order is the same on all ranks. Do not issue them from a thread of your own."
        )
    fiber.requests.put((request, _stream()))
    del request  # so that the scheduler may free its tensor
    return _result(fiber.results.get())  # type: ignore[no-any-return]


def flow_of(function: Callable[[], T]) -> Generator[Collective, Tensor, T]:
    """Run ``function()`` as a flow that yields the requests which the function passes to :func:`execute`.

    >>> from hvdbridge.policy.collectives import AllReduce
    >>> from hvdbridge.execution.scheduler import drive
    >>> drive(flow_of(lambda: execute(AllReduce(torch.ones(2))) + 1), lambda request: request.tensor * 4)
    tensor([5., 5.])
    """
    try:  # the schedulers of several synchronizers share the list
        fiber = _idle_fibers.pop()
    except IndexError:
        fiber = _Fiber()
    fiber.work.put((function, _stream()))
    while True:
        request, stream = fiber.requests.get()
        if isinstance(request, tuple):
            _idle_fibers.append(fiber)
            return _result(request)  # type: ignore[no-any-return]
        current = _stream()
        if stream is not None and stream != current:
            current.wait_stream(stream)
        try:
            tensor = yield request
        except GeneratorExit as end:
            fiber.abandoned = True
            fiber.results.put((None, end))
            raise
        except Exception as error:
            fiber.results.put((None, error))
            continue
        finally:
            del request
        current = _stream()
        if stream is not None and stream != current:
            stream.wait_stream(current)
            if tensor.is_cuda:
                tensor.record_stream(stream)
        fiber.results.put((tensor, None))
        del tensor


def _result(outcome: Outcome) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None
