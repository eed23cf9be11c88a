"""What stands for ``horovod.data.data_loader_base``: loaders that read ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        """What becomes of each batch before it is handed out."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Before a :class:`BaseDataLoader` among a class's bases: a thread reads ahead.

    The thread ends with its epoch: what ``set_epoch`` says between two epochs holds for the next one. (Horovod's own
    reads on into the next epoch.) An exception in ``_iterate`` is raised where the batch would have come.

    Args:
        async_loader_queue_size: how many batches it may be ahead; 0: there is no thread.
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
        self._readers: list[_Reader] = []
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the threads of epochs that were left. Harmless when repeated."""
        while self._readers:
            self._readers.pop().close()

    def __iter__(self: Any) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        reader = _Reader(self._iterate(), self.async_loader_queue_size)
        self._readers.append(reader)
        try:
            for batch in reader.batches():
                yield self._process_batch(batch)
        finally:  # also where the loop that asks for them is left
            reader.stop()
            if reader in self._readers:
                self._readers.remove(reader)


class _Reader:
    """A thread that reads one epoch."""

    def __init__(self, source: Iterable[Any], ahead: int) -> None:
        self._source = source
        self._queue: Queue[tuple[bool, Any]] = Queue(ahead)  # (is it a batch, the batch or how it ended)
        self._stopped = Event()
        self._thread = Thread(target=self._read, name="hvdbridge-loader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        end = None
        try:
            for batch in self._source:
                self._queue.put((True, batch))
                if self._stopped.is_set():
                    return
        except Exception as error:
            end = error
        self._queue.put((False, end))

    def batches(self) -> Iterator[Any]:
        while True:
            goes_on, value = self._queue.get()
            if goes_on:
                yield value
            elif value is None:
                return
            else:
                raise value

    def stop(self) -> None:
        """It reads no further than the batch that it is at, and holds none. Does not wait."""
        self._stopped.set()
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def close(self) -> None:
        self.stop()
        self._thread.join()
