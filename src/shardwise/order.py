"""Which of two dots that read the same value comes first.

A backward pass has pairs of them: the cotangent of a layer's result goes into the gradient of the
weights, which only the optimizer reads, and into the gradient of the layer's input, on which all
earlier layers wait.  JAX may write the former first.  It would then take an activation that the
forward pass gathered, and keep that alive all the while, although the latter gathers the cotangent
right after; in this order it finds the cotangent gathered, and chooses between the two.
"""

from __future__ import annotations

from shardwise.program import Body, Eqn, Lit, Var


def longest_first(body: Body) -> None:
    """Of dots that read the same value, put those with more to follow first; in every body, in place."""
    bodies = body.all()
    carried = {
        sub: eqn.params.get("num_carry", 0) for b in bodies for eqn in b.eqns for sub in eqn.bodies
    }
    for b in bodies:
        _longest_first(b, carried.get(b, 0))


def _longest_first(body: Body, carried: int) -> None:
    """The first `carried` results of a body go into its next iteration: all of it follows them."""
    order = _Order(body, carried)
    for eqn in body.eqns:
        if eqn.name == "dot_general":
            order.place_rivals(eqn)
        order.place(eqn)
    body.eqns = order.out


class _Order:
    """The equations placed so far, and what decides which comes next."""

    def __init__(self, body: Body, carried: int):
        self.out: list[Eqn] = []
        self.placed: set[Eqn] = set()
        self.maker = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        self.follow = _follow(body, carried)
        self.readers: dict[Var, list[Eqn]] = {}
        for eqn in body.eqns:
            if eqn.name == "dot_general":
                for v in dict.fromkeys(eqn.invars):
                    self.readers.setdefault(v, []).append(eqn)

    def place(self, eqn: Eqn) -> None:
        if eqn not in self.placed:
            self.placed.add(eqn)
            self.out.append(eqn)

    def place_rivals(self, eqn: Eqn) -> None:
        """Place the dots that are to come before a dot, with what little they still need."""
        if eqn in self.placed:
            return
        rivals = {e: None for v in eqn.invars for e in self.readers[v]}
        for rival in sorted(rivals, key=lambda e: -self.follow[e]):
            if self.follow[rival] <= self.follow[eqn]:
                break
            if rival not in self.placed and (before := self.missing(rival)) is not None:
                for e in (*before, rival):
                    self.place(e)

    def missing(self, eqn: Eqn) -> list[Eqn] | None:
        """The equations not yet placed that an equation needs, if they are light: no dot, no body."""
        seen: set[Eqn] = set()
        out: list[Eqn] = []

        def light(v: Var) -> bool:
            e = None if isinstance(v, Lit) else self.maker.get(v)
            if e is None or e in self.placed or e in seen:
                return True
            if e.name == "dot_general" or e.bodies or len(seen) == _LIGHT:
                return False
            seen.add(e)
            if not all(map(light, e.invars)):
                return False
            out.append(e)
            return True

        return out if all(map(light, eqn.invars)) else None


_LIGHT = 8  # a transpose, a convert, an annotation or two: not a layer


def _follow(body: Body, carried: int) -> dict[Eqn, int]:
    """The length of the longest chain of equations from each one to a result of the body."""
    after: dict[Var, int] = dict.fromkeys(body.outvars[:carried], len(body.eqns))
    out = {}
    for eqn in reversed(body.eqns):
        out[eqn] = 1 + max((after.get(v, 0) for v in eqn.outvars), default=0)
        for v in eqn.invars:
            after[v] = max(after.get(v, 0), out[eqn])
    return out
