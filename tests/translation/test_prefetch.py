"""Batches made ahead on a thread: in order, with errors, a clean end, and no waiting."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from shardwise.translation.prefetch import Prefetch


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "shardwise-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


def test_every_step_in_order():
    with Prefetch(lambda step: step * step, start=3, stop=9) as ahead:
        assert list(ahead) == [(s, s * s) for s in range(3, 9)]
        assert list(ahead) == []  # ended stays ended
    with Prefetch(lambda step: step, stop=0) as ahead:
        assert list(ahead) == []


def test_it_makes_so_many_ahead_and_no_more():
    made, enough = [], threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if len(made) == 3:
            enough.set()
        return step

    with Prefetch(make, depth=3) as ahead:
        assert enough.wait(10)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        assert next(ahead) == (0, 0)


def test_an_error_comes_where_its_step_would_have():
    def make(step: int) -> int:
        if step == 2:
            raise KeyError("no such shard")
        return step

    with Prefetch(make) as ahead:
        assert [next(ahead), next(ahead)] == [(0, 0), (1, 1)]
        for _ in range(2):  # and again, if asked again
            with pytest.raises(KeyError, match="no such shard") as caught:
                next(ahead)
        assert any(entry.name == "make" for entry in caught.traceback)


def test_leaving_in_the_middle_ends_the_thread():
    with pytest.raises(RuntimeError, match="of the consumer"), Prefetch(lambda step: step) as ahead:
        next(ahead)
        raise RuntimeError("of the consumer")
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()  # once more does no harm


def test_closing_from_another_thread_wakes_the_consumer():
    stuck = threading.Event()
    ahead = Prefetch(lambda step: stuck.wait(10))
    found: list[object] = []
    consumer = threading.Thread(target=lambda: found.extend(ahead))
    consumer.start()
    closer = threading.Thread(target=ahead.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive() and found == []
    stuck.set()
    closer.join(5)
    assert not closer.is_alive()


def test_a_step_that_takes_longer_than_a_batch_does_not_wait():
    with Prefetch(lambda step: time.sleep(0.002), depth=3) as ahead:
        for _ in itertools.islice(ahead, 40):
            time.sleep(0.01)
    assert ahead.waiting < 0.2


def test_waiting_is_measured():
    with Prefetch(lambda step: time.sleep(0.02), stop=10) as ahead:
        for _ in ahead:
            time.sleep(0.005)
    assert 0.4 < ahead.waiting < 1
    assert ahead.waited > 0.09  # nine times 20 ms, less the 5 ms of the loop


def test_no_depth_is_refused():
    with pytest.raises(ValueError, match="at least one step is made ahead, not 0"):
        Prefetch(lambda step: step, depth=0)
