"""The counterpart of ``horovod.data.data_loader_base``: data loaders that prefetch batches in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any


class BaseDataLoader:
    """Base of data loaders. A subclass implements :meth:`_iterate` and ``__len__``."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """Return an iterable over the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Return ``batch``; a subclass may convert each batch here."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Prefetches batches in a thread. Put it before a :class:`BaseDataLoader` among the bases of a class.

    The thread ends with its epoch, so ``set_epoch`` between two epochs takes effect in the next one. (Horovod's own
    thread reads on into the next epoch.) An exception in ``_iterate`` is raised in the loop over the batches.

    Args:
        async_loader_queue_size: maximum number of prefetched batches; 0: no thread.
        debug_data_loader: ignored.
        args, kwargs: arguments of the other bases.

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
        """End the threads of epochs that the script did not iterate to their end. Harmless when repeated."""
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
            """Make the thread end after its current batch, and drop prefetched batches. Does not wait."""
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
        finally:  # also when the script breaks out of the loop over the batches
            stop()
            self._readers.pop(thread, None)
