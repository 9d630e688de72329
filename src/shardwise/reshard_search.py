"""The search behind `reshard`: the cheapest list of collectives from one split to another (A*).

Why it is fast: a device must receive what it wants and does not hold, however it is sent.  That
lower bound (`Problem.bound`) is met exactly by the best plan in most cases, so a state from which
one hop meets it ends the search, and A* seldom visits more than a handful of states.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.reshard_model import Hop, Problem, State
from shardwise.reshard_moves import moves

MAX_CHUNKS = 6  # with more, only moves toward the target are tried
MAX_HOPS = 4000  # hops priced before the search does the same and grows greedy (some 40 ms)
MAX_HOPS_BELOW = 1500  # hops priced before it gives up improving on a plan it was given


class Plan(NamedTuple):
    """The hops of the cheapest path found, its price, and how many states were expanded."""

    hops: tuple[Hop, ...]
    price: int
    expanded: int


@functools.lru_cache(maxsize=4096)
def search(problem: Problem) -> Plan:
    """The cheapest plan.

    It is the cheapest of all where there are at most `MAX_CHUNKS` chunks and the search ends within
    `MAX_HOPS`, as it does for meshes of three axes; beyond, a good one.
    """
    plan = _planned(_Search(problem, None))
    assert plan is not None, "gathering, reducing and slicing reach any target"
    return plan


@functools.lru_cache(maxsize=4096)
def search_below(problem: Problem, price: int) -> Plan | None:
    """A plan that costs less than `price`, or None where none is found soon."""
    return _planned(_Search(problem, price))


def _planned(run: _Search) -> Plan | None:
    hops = run.hops()
    if hops is None:
        return None
    hops = _merged(run.problem, hops)
    return Plan(tuple(hops), sum(map(run.problem.price, hops)), len(run.done))


class _Search:
    """A* from source to target."""

    def __init__(self, problem: Problem, below: int | None):
        self.problem, self.below = problem, below
        self.limit = MAX_HOPS if below is None else MAX_HOPS_BELOW
        self.wide = len(problem.sizes) <= MAX_CHUNKS
        self.best: dict[State, int] = {problem.source: 0}
        self.came: dict[State, Hop] = {}
        self.done: set[State] = set()
        self.priced = 0

    def hops(self) -> list[Hop] | None:
        """The hops to the target; None where there are none below the price."""
        target = self.problem.target
        heap = [(0, 0, 0, self.problem.source)]
        ticket = 0  # ties go to the state found first: plans do not depend on hashing
        while heap:
            *_, state = heapq.heappop(heap)
            if state == target:
                return _path(self.came, state)
            if state in self.done:
                continue
            self.done.add(state)
            greed = 1 + self.priced // MAX_HOPS  # the longer it takes, the straighter it goes
            for after, price, rest in self.steps(state):
                ticket += 1
                heapq.heappush(heap, (price + greed * rest, rest, ticket, after))
            if self.below is not None and self.priced > self.limit:
                return None
        return None

    def steps(self, state: State) -> Iterator[tuple[State, int, int]]:
        """States reached more cheaply through `state`: their price, and a bound on what is left."""
        p, best = self.problem, self.best
        for hop in self.moves(state):
            price = best[state] + p.price(hop)
            if price >= best.get(hop.after, price + 1):
                continue
            rest = p.rest(hop.after)
            if self.below is None or price + rest < self.below:
                best[hop.after], self.came[hop.after] = price, hop
                yield hop.after, price, rest

    def moves(self, state: State) -> Iterator[Hop]:
        """All hops from a state while that is affordable, then those toward the target."""
        if self.wide:
            for hop in moves(self.problem, state, wide=True):
                self.priced += 1
                yield hop
                if self.priced > self.limit:
                    self.wide = False
                    break
            else:
                return
        for hop in moves(self.problem, state, wide=False):
            self.priced += 1
            yield hop


def _path(came: dict[State, Hop], state: State) -> list[Hop]:
    hops = []
    while state in came:
        hops.append(came[state])
        state = came[state].before
    return hops[::-1]


def _merged(p: Problem, hops: list[Hop]) -> list[Hop]:
    """Neighbouring hops made one where one collective does both at no higher price."""
    out: list[Hop] = []
    for hop in hops:
        while out:
            both = p.hop(out[-1].before, hop.after)
            if both is None or p.price(both) > p.price(out[-1]) + p.price(hop):
                break
            out.pop()
            hop = both
        out.append(hop)
    return out
