"""A call's arguments: taken apart, named, described, placed; and its results.

`jax.jit`'s rules hold: static arguments by position, by keyword or left to their default; negative
positions count from the end; Python scalars are weakly typed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwise import _jax
from shardwise.errors import ShardingError
from shardwise.padded import PaddedArray
from shardwise.plan import border_shape
from shardwise.sharding import Layout

# -- the function's signature ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The positional parameters of a function, and which of them are static or donated.

    Attributes:
      names: as far as they can be known.
      static, donated: positions; negative ones count from the end of a call's arguments.
    """

    names: tuple[str, ...]
    static: tuple[int, ...]
    donated: tuple[int, ...]

    @staticmethod
    def of(fn: Callable[..., Any], static: Any, donated: Any, where: str) -> Parameters:
        """Raises ShardingError: positions that are no integers, or that no call can have."""
        kinds = _kinds(fn)
        names = tuple(n for n, k in kinds if k in (_POSITIONAL, _EITHER))
        open_ended = not kinds or any(k == inspect.Parameter.VAR_POSITIONAL for _, k in kinds)
        out = []
        for option, nums in (("static_argnums", static), ("donate_argnums", donated)):
            nums = _positions(nums, option, where)
            for i in nums:
                if not open_ended and not -len(names) <= i < len(names):
                    raise ShardingError(
                        f"{option} names argument {i}, and `{_name(fn)}` has {len(names)}",
                        where=where,
                        facts=f"its parameters are {', '.join(names) or 'none'}",
                    )
            out.append(nums)
        return Parameters(names, *out)

    def name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f"arg{i}"

    def chosen(self, which: Sequence[int], count: int) -> tuple[frozenset[int], frozenset[str]]:
        """Of a call with `count` positional arguments: positions and keywords among `which`."""
        at = {i + count if i < 0 else i for i in which}
        keywords = {self.name(i) for i in at if i >= count}
        return frozenset(i for i in at if i < count), frozenset(keywords)


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _kinds(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    try:
        return [(p.name, p.kind) for p in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _positions(nums: Any, option: str, where: str) -> tuple[int, ...]:
    nums = tuple(nums) if isinstance(nums, (list, tuple, set, range)) else (nums,)
    for n in nums:
        if isinstance(n, bool) or not isinstance(n, int):
            raise ShardingError(f"{option} needs positions of arguments, not {n!r}", where=where)
    return nums


# -- one call ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call's arguments, taken apart.

    Attributes:
      leaves: the dynamic arguments, flat (a `PaddedArray` is one leaf).
      tree: their structure, as (args, kwargs).
      static: (position or keyword, type, value) of each static argument.
    """

    leaves: tuple[Any, ...]
    tree: Any
    static: tuple[tuple[int | str, type, Any], ...]
    parameters: Parameters

    @staticmethod
    def of(parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Raises ShardingError: a static argument that is not hashable."""
        at, keywords = parameters.chosen(parameters.static, len(args))
        static = [(i, type(args[i]), args[i]) for i in sorted(at)]
        static += [(k, type(kwargs[k]), kwargs[k]) for k in sorted(keywords & kwargs.keys())]
        for key, _, value in static:
            _check_hashable(key if isinstance(key, str) else parameters.name(key), value)
        dynamic = tuple(a for i, a in enumerate(args) if i not in at)
        rest = {k: v for k, v in kwargs.items() if k not in keywords}
        leaves, tree = jax.tree.flatten((dynamic, rest), is_leaf=is_padded)
        return Call(tuple(leaves), tree, tuple(static), parameters)

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """args and kwargs as the user's function takes them, with `leaves` for the dynamic ones."""
        dynamic, kwargs = jax.tree.unflatten(self.tree, leaves)
        args = list(dynamic)
        for key, _, value in self.static:  # positions come in ascending order
            if isinstance(key, str):
                kwargs = {**kwargs, key: value}
            else:
                args.insert(key, value)
        return args, kwargs

    @functools.cached_property
    def _paths(self) -> list[tuple[int | str, tuple[Any, ...]]]:
        """For each leaf its argument (a position among the dynamic ones, or a keyword) and path."""
        whole = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        out = []
        for (which, first, *rest), _ in jax.tree_util.tree_flatten_with_path(whole)[0]:
            out.append((first.idx if which.idx == 0 else first.key, tuple(rest)))
        return out

    @functools.cached_property
    def _dynamic(self) -> list[int]:
        """The positions of the dynamic positional arguments."""
        taken = {k for k, _, _ in self.static}
        count = len(self.trees[0].children()) + sum(isinstance(k, int) for k in taken)
        return [i for i in range(count) if i not in taken]

    @functools.cached_property
    def trees(self) -> tuple[Any, Any]:
        """The structures of the positional and of the keyword arguments."""
        args, kwargs = self.tree.children()
        return args, kwargs

    @property
    def shown_tree(self) -> Any:
        """The arguments' tree as plans show it: positional ones, and keywords where there are any."""
        return self.tree if self.trees[1].num_leaves else self.trees[0]

    @functools.cached_property
    def names(self) -> list[str]:
        """For each leaf the user's name for it: `params['wi']`."""

        def name(at: int | str) -> str:
            return at if isinstance(at, str) else self.parameters.name(self._dynamic[at])

        return [name(at) + jax.tree_util.keystr(rest) for at, rest in self._paths]

    @functools.cached_property
    def avals(self) -> list[Any]:
        """The abstract arguments.

        Raises:
          ShardingError: not an array; the line is the caller's.
        """
        out = []
        for i, x in enumerate(self.leaves):
            try:
                out.append(abstract(x))
            except TypeError:
                raise ShardingError(
                    f"argument {self.names[i]} is not an array",
                    where=_jax.current_source(),
                    facts=f"it is {x!r:.60} of type {type(x).__name__}",
                    hint="pass arrays, or name its position in static_argnums",
                ) from None
        return out

    @functools.cached_property
    def donated_arguments(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Positions among the dynamic arguments, and keywords, whose buffers may be reused."""
        count = len(self._dynamic) + sum(isinstance(k, int) for k, _, _ in self.static)
        at, keywords = self.parameters.chosen(self.parameters.donated, count)
        return tuple(i for i, p in enumerate(self._dynamic) if p in at), tuple(sorted(keywords))

    @functools.cached_property
    def donated(self) -> tuple[bool, ...]:
        """Whether each leaf's buffer may be reused."""
        at, keywords = self.donated_arguments
        return tuple(w in keywords if isinstance(w, str) else w in at for w, _ in self._paths)


def is_padded(x: Any) -> bool:
    return isinstance(x, PaddedArray)


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ShardingError(
            f"static argument {name} is not hashable",
            where=_jax.current_source(),
            facts=f"it is a {type(value).__name__}",
            hint="a static argument is part of the cache's key: pass a tuple or a frozen dataclass",
        ) from None


def abstract(x: Any) -> Any:
    """The shape, dtype and weak type of an array, as `jax.jit` sees it; TypeError where it is none."""
    if isinstance(x, (PaddedArray, jax.ShapeDtypeStruct)):
        dtype = x.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, weak_type=getattr(x, "weak_type", False))
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def check_untyped(x: Any, name: str, where: str) -> None:
    """Raises ShardingError for a traced argument whose type says how it lies (Explicit axes)."""
    s = getattr(jax.typeof(x), "sharding", None)
    if s is not None and any(s.spec) and jax.sharding.AxisType.Explicit in s.mesh.axis_types:
        raise ShardingError(
            f"traced argument {name} has its sharding in its type",
            where=where,
            facts=f"it is {jax.typeof(x).str_short(True)}, on a mesh with axes of type Explicit",
            hint="call it outside jit, or make the mesh with axis_types=(AxisType.Auto, ...)",
        )


def signature(aval: Any) -> Any:
    """What of an abstract argument a plan depends on, hashable."""
    return aval.shape, aval.dtype, aval.weak_type


def type_text(aval: Any) -> str:
    """`float32[8,4]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


# -- arrays in and out ---------------------------------------------------------------------------------


def place(x: Any, layout: Layout, sharding: NamedSharding, donate: bool) -> Any:
    """An argument as the compiled program takes it: padded where a split dim is uneven, and placed."""
    if is_padded(x):
        if tuple(x.array.shape) == border_shape(layout):
            return _put(x.array, sharding, donate)
        x = x.logical()
    if border_shape(layout) != layout.shape:
        return PaddedArray.from_logical(x, sharding).array
    return _put(x, sharding, donate)


def _put(x: Any, sharding: NamedSharding, donate: bool) -> Any:
    if isinstance(x, jax.Array):
        if x.sharding == sharding:
            return x
        return jax.device_put(x, sharding, donate=donate)
    return jax.device_put(x, sharding)


def result(x: Any, layout: Layout, sharding: NamedSharding) -> Any:
    """A result as the user gets it: called by the sharding asked for, padded where a split dim is uneven.

    Where that has another order of devices, the program left each block where it belongs.
    """
    if x.sharding != sharding:
        at = {s.device: s.data for s in x.addressable_shards}
        mesh: Any = sharding.mesh
        blocks = [at[d] for d in mesh.devices.flat if d in at]
        x = jax.make_array_from_single_device_arrays(x.shape, sharding, blocks)
    return x if border_shape(layout) == layout.shape else PaddedArray(x, layout.shape, sharding)
