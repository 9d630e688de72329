"""Makes things ahead of their use, in order, on a thread: the step finds its batch ready.

with Prefetch(lambda step: batches.on_devices(step, sharding), start=first) as ahead:
    for step, batch in ahead:
        state = train_step(state, batch)
ahead.waiting  # share of the time that the loop waited for batches
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An iterator over (step, make(step)) for step = start, start + 1, ...

    `make` runs on one thread of its own, at most `depth` steps ahead.  An error in it is raised by
    the `next` that would have given that step, with its own traceback; earlier steps still come.

    Closing, or leaving the `with`, stops the thread after the step it is making; the iterator then
    ends.  It is a daemon thread: one that is never closed does not keep the program alive.

    Args:
      stop: the step to end before; None for no end.
      depth: steps made ahead; 0 is not allowed.
    """

    def __init__(
        self, make: Callable[[int], T], start: int = 0, stop: int | None = None, depth: int = 2
    ) -> None:
        if depth < 1:
            raise ValueError(f"at least one step is made ahead, not {depth}")
        self._make = make
        self._depth = depth
        self._ready: collections.deque[tuple[int, T]] = collections.deque()
        self._error: BaseException | None = None
        self._made_all = False
        self._closed = False
        self._change = threading.Condition()
        self._given = 0
        self._waited = 0.0
        self._since: float | None = None
        self._last = 0.0
        self._thread = threading.Thread(
            target=self._run, args=(start, stop), name="shardwise-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        asked = time.perf_counter()
        with self._change:
            while not (self._ready or self._made_all or self._closed):
                self._change.wait()
            if self._closed:
                raise StopIteration
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            item = self._ready.popleft()
            self._change.notify_all()
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        else:
            self._waited += now - asked
        self._last = now
        self._given += 1
        return item

    @property
    def waiting(self) -> float:
        """Share of the time, from the first step given to the last, spent waiting for the next."""
        if self._since is None or self._last <= self._since:
            return 0.0
        return self._waited / (self._last - self._since)

    @property
    def waited(self) -> float:
        """Seconds spent waiting, the first step left out."""
        return self._waited

    def close(self) -> None:
        """Stops the thread and waits for it.  May be called again, and from the thread's own `make`."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, step: int, stop: int | None) -> None:
        try:
            while stop is None or step < stop:
                with self._change:
                    while len(self._ready) >= self._depth and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return
                item = self._make(step)  # outside the lock: the consumer goes on meanwhile
                with self._change:
                    if self._closed:
                        return
                    self._ready.append((step, item))
                    self._change.notify_all()
                step += 1
        except BaseException as error:
            self._error = error
        finally:
            with self._change:
                self._made_all = True
                self._change.notify_all()
