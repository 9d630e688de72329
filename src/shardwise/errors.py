"""Errors that say what, where, the facts, and the remedy."""

from __future__ import annotations


class ShardingError(ValueError):
    """A sharding that cannot be: what is wrong, where, the facts, and what to do about it.

    Attributes:
      what, where, facts, hint: the parts of the message; empty where there is nothing to say.
    """

    def __init__(self, what: str, *, where: str = "", facts: str = "", hint: str = ""):
        self.what, self.where, self.facts, self.hint = what, where, facts, hint
        lines = [what]
        if where:
            lines.append(f"  at    {where}")
        if facts:
            lines.append(f"  facts {facts}")
        if hint:
            lines.append(f"  hint  {hint}")
        super().__init__("\n".join(lines))
