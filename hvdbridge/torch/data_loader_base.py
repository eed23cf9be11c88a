"""The stand-in for ``horovod.data.data_loader_base``: loaders that read ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any


class BaseDataLoader:
    """Base of loaders: a subclass writes :meth:`_iterate` and ``__len__``."""

    def __len__(self) -> int:
        """How many batches there are."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """The batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Convert each batch before the loop gets it."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Reads ahead in a thread; stands before a :class:`BaseDataLoader` among a class's bases.

    The thread ends with its epoch, so ``set_epoch`` between two epochs changes the next one. (Horovod's own thread
    reads on into the next epoch.) The loop over the batches raises an exception of ``_iterate``.

    Args:
        async_loader_queue_size: how many batches the thread may be ahead; 0: there is no thread.
        debug_data_loader: without effect.
        args, kwargs: of the loader.

    >>> class Numbers(BaseDataLoader):
    ...     def _iterate(self):
    ...         yield from range(3)
    ...     def __len__(self):
    ...         return 3
    >>> class Ahead(AsyncDataLoaderMixin, Numbers):
    ...     pass
    >>> loader = Ahead(async_loader_queue_size=2)
    >>> list(loader), list(loader)
    ([0, 1, 2], [0, 1, 2])
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: dict[Thread, Callable[[], None]] = {}
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the threads of epochs that the script left. Harmless when repeated."""
        while self._readers:
            thread, stop = self._readers.popitem()
            stop()
            thread.join()

    def __iter__(self: Any) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        source, stopped = self._iterate(), Event()
        queue: Queue[tuple[bool, Any]] = Queue(self.async_loader_queue_size)  # (True, batch), or (False, error or None)

        def read() -> None:
            end = None
            try:
                for batch in source:
                    queue.put((True, batch))
                    if stopped.is_set():
                        return
            except Exception as error:
                end = error
            queue.put((False, end))

        def stop() -> None:
            """Let the thread end with its present batch, without waiting, and drop what it has read."""
            stopped.set()
            with suppress(Empty):
                while True:
                    queue.get_nowait()

        thread = Thread(target=read, name="hvdbridge-loader", daemon=True)
        self._readers[thread] = stop
        thread.start()
        try:
            while (item := queue.get())[0]:
                yield self._process_batch(item[1])
            if item[1] is not None:
                raise item[1]
        finally:  # also where the script leaves the loop over the batches
            stop()
            self._readers.pop(thread, None)
