"""`Plan`: a program with a sharding and a reason for every value, and all one can ask of it.

Nothing here needs a device: shapes may be `ShapeDtypeStruct`s, the mesh an `AbstractMesh` of any size.
The per-device jaxpr is traced when first asked for; collectives, bytes, flops and memory are read from
it, so that no number describes a second version of the program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise import _jax, fft_passes
from shardwise.border import enter, leave
from shardwise.callbacks import HANDLERS
from shardwise.complete import Completion, Given, complete
from shardwise.convert import to_spec
from shardwise.cost import comm, flops, memory
from shardwise.cost.comm import Collective
from shardwise.device_tensor import DeviceOrder
from shardwise.explain import text
from shardwise.mesh import MeshAxes
from shardwise.notes import Fallback, Note
from shardwise.partition import Partitioner
from shardwise.program import ANNOTATIONS, Body, Eqn, Var
from shardwise.regions import regions_of
from shardwise.repeats import Call
from shardwise.resolve import from_constraint_params, resolve
from shardwise.sharding import Layout, Sharding, padded_size
from shardwise.windows import Limits


class Plan:
    """What `spmd` decided for one program on one mesh.

    Attributes:
      mesh: the mesh planned for; `axes` its axes and atoms.
      body: the captured program; `completion` shardings and reasons of its values.
      in_tree, out_tree: trees of arguments and results.
      names: what arguments are called, e.g. `params['wi']`.
      device_orders: values, and stand-ins of results, that the user asked for on devices in another
        order than the mesh's, with the device that is to hold the block of device i.
      donated: whether each argument's buffer may be reused for a result.
    """

    def __init__(
        self, mesh: Any, body: Body, completion: Completion, in_tree: Any, out_tree: Any, names: Any,
        limits: Limits | None = None, device_orders: dict[Var, DeviceOrder] | None = None,
        donated: Sequence[bool] = (),
    ):  # fmt: skip
        self.mesh, self.body, self.completion = mesh, body, completion
        self.axes: MeshAxes = completion.mesh
        self.in_tree, self.out_tree, self.names = in_tree, out_tree, names
        self.partitioner = Partitioner(completion, limits, {**HANDLERS, **fft_passes.HANDLERS})
        self.device_orders = device_orders or {}
        self.donated = tuple(donated) or (False,) * len(body.invars)

    # -- shardings ---------------------------------------------------------------------------------

    @functools.cached_property
    def in_layouts(self) -> list[Any]:
        return [self._layout(v) for v in self.body.invars]

    @functools.cached_property
    def out_layouts(self) -> list[Any]:
        return [self._layout(v) for v in self.completion.results]

    def _layout(self, v: Any) -> Any:
        s = self.completion.sharding(v)
        # At the border every split dim has blocks of ceil(D/P), whatever the program uses inside.
        padded = tuple(
            padded_size(d, [self.axes.size(a)]) for d, a in zip(v.shape, s.axes, strict=True)
        )
        return Layout(v.shape, padded, s)

    @property
    def in_shardings(self) -> Any:
        """A tree of PartitionSpecs like the arguments (on the atom mesh where an axis is split up)."""
        return jax.tree.unflatten(self.in_tree, [self.spec(l.sharding) for l in self.in_layouts])

    @property
    def out_shardings(self) -> Any:
        """A tree of PartitionSpecs like the results."""
        return jax.tree.unflatten(self.out_tree, [self.spec(l.sharding) for l in self.out_layouts])

    def spec(self, s: Sharding) -> P:
        """A sharding as a PartitionSpec: on the user's axes, or on atoms where only part is used."""
        whole = all(self.axes.exact(d) is not None for d in s.axes)
        return to_spec(s, self.axes, atoms=not whole)

    # -- the per-device program --------------------------------------------------------------------

    def device_function(self, delivered: bool = True) -> Callable[..., Any]:
        """The program on one device's blocks (to be run under shard_map over the atom mesh).

        It takes the arguments that are `passed`.  `delivered`: results asked for on another order of
        the devices are sent there, else they stay in the mesh's order.
        """
        results = self.completion.results
        orders = [self.device_orders.get(r) if delivered else None for r in results]

        def run(*blocks: Any) -> list[Any]:
            p = self.partitioner
            p.reset()
            block = iter(blocks)
            values = []
            for v, layout, passed in zip(
                self.body.invars, self.in_layouts, self.passed, strict=True
            ):
                x = next(block) if passed else jnp.zeros(v.shape, v.dtype)
                values.append(enter(p, v, x, layout))
            outs = p.run(self.body, values)
            return leave(p, self.body, outs, self.out_layouts, orders)

        return run

    @functools.cached_property
    def passed(self) -> list[bool]:
        """Which arguments the device function takes: those with any entries.

        There is nothing in the others, and XLA cannot lower a shard_map that takes only such.
        """
        extended = jax.dtypes.extended
        return [v.size > 0 or jnp.issubdtype(v.dtype, extended) for v in self.body.invars]

    def mapped(self, delivered: bool = True) -> Callable[..., Any]:
        """The program on global, padded arrays: `shard_map` of the device function."""
        specs = [P(*(a or None for a in l.sharding.axes)) for l in self.in_layouts]
        run = jax.shard_map(
            self.device_function(delivered),
            mesh=self.axes.atom_mesh(self.mesh),
            in_specs=tuple(itertools.compress(specs, self.passed)),
            out_specs=[P(*(a or None for a in l.sharding.axes)) for l in self.out_layouts],
            check_vma=False,
        )

        def mapped(*args: Any) -> list[Any]:
            with _jax.no_context_mesh():
                return run(*itertools.compress(args, self.passed))

        return mapped

    def padded_avals(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(border_shape(l), v.dtype)
            for v, l in zip(self.body.invars, self.in_layouts, strict=True)
        ]

    @functools.cached_property
    def traced(self) -> Any:
        """The jaxpr of the whole call; set by `spmd` when the program was traced for running."""
        with _jax.uncollected():
            return jax.make_jaxpr(self.mapped())(*self.padded_avals())

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The per-device jaxpr (inside shard_map), without what nobody reads: a value annotated twice
        may be cut for its readers from where it lay before, and the compiler drops the first move."""
        for eqn in _jax.open_jaxpr(_jax.dce(self.traced))[0].eqns:
            if eqn.primitive.name == "shard_map":
                return eqn.params["jaxpr"]
        raise AssertionError("no shard_map in the traced program: a shardwise bug")

    # -- what it costs -----------------------------------------------------------------------------

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every collective with its reason, in program order."""
        found = comm.find(self.jaxpr, self.axes)
        notes = self.partitioner.notes
        out = []
        for f in found:
            note = notes[f.notes[-1]] if f.notes else None
            for k in reversed(f.notes[:-1]):
                if note is not None and isinstance(call := notes[k], Call):
                    note = call.of_mine(note)
            out.append(self._collective(f, note))
        return out

    def _collective(self, f: comm.Found, note: Note | None) -> Collective:
        eqn = note.eqn if note else None
        return Collective(
            f.kind, self.axes.merge(f.atoms), self.axes.size(f.atoms), f.bytes, f.count,
            eqn.name if eqn and eqn.primitive else "result",
            eqn.source if eqn else "<result>",
            text.reason(self, note) if note else "", f.shape, f.dtype, f.per_iteration,
        )  # fmt: skip

    @property
    def comm_bytes(self) -> float:
        """Bytes one device sends per call (ring algorithms, loops multiplied)."""
        return comm.total(self.collectives)

    @property
    def fallbacks(self) -> list[Fallback]:
        """Where a value had to be replicated, and why."""
        _ = self.jaxpr
        return list(dict.fromkeys(self.partitioner.fallbacks))

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of one device per call."""
        return flops.flops(self.jaxpr)

    @functools.cached_property
    def peak_memory(self) -> int:
        """Bytes of one device: arguments, results, and the largest set of values alive at once.

        A result that fits into the buffer of a donated argument takes no room of its own.
        """
        return memory.peak_memory(self.jaxpr, list(itertools.compress(self.donated, self.passed)))

    # -- words -------------------------------------------------------------------------------------

    def explain(self) -> str:
        """The whole plan as text: values with shardings and reasons, collectives, fallbacks."""
        return text.explain(self)

    def why(self, name: str) -> str:
        """Why a value is sharded as it is: the chain of equations back to an annotation.

        Args:
          name: an argument's name (`params['wi']` or `params.wi`), `result0`, or a value of
            `explain()`, like `v12`.
        """
        return text.why(self, name)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to another of the same program."""
        return text.diff(self, other)

    def __repr__(self) -> str:
        return f"<Plan of {len(self.body.eqns)} equations on {self.axes}>"


def border_shape(layout: Any) -> tuple[int, ...]:
    """The global shape of an argument or result as the compiled program takes it: split dims padded."""
    return tuple(
        p if a else s
        for s, p, a in zip(layout.shape, layout.padded, layout.sharding.axes, strict=True)
    )


def annotated(body: Body, mesh: Any) -> dict[Eqn, Given]:
    """Every annotation equation of a program with what it says."""
    out = {}
    for eqn in body.eqns:
        for sub in eqn.bodies:
            out.update(annotated(sub, mesh))
        if eqn.name not in ANNOTATIONS:
            continue
        rank = eqn.outvars[0].rank
        if eqn.name == "annotation":
            r = resolve(eqn.params, rank, mesh)
            source = eqn.params["source"]
        else:
            r = from_constraint_params(eqn.params, rank, mesh)
            source = eqn.source
        out[eqn] = Given(r.sharding.axes, r.open, source, "annotation", r.device_order)
    return out


def make_plan(
    mesh: Any, body: Body, arguments: list[Given | None], results: list[Given | None],
    in_tree: Any, out_tree: Any, names: list[str], limits: Limits | None = None,
    donated: Sequence[bool] = (),
) -> Plan:  # fmt: skip
    """Complete a captured program into a plan."""
    said = annotated(body, mesh)
    regions = regions_of(body, mesh)
    regions.check_annotations({e.outvars[0]: (g.axes, g.source) for e, g in said.items()},
                              MeshAxes.of(mesh))  # fmt: skip
    completion = complete(body, MeshAxes.of(mesh), arguments, results, said, regions)
    asked = {eqn.outvars[0]: g.device_order for eqn, g in said.items()}
    for v, result, g in zip(body.outvars, completion.results, results, strict=True):
        asked[result] = g.device_order if g is not None else asked.get(v)
    orders = {v: order for v, order in asked.items() if order is not None}
    return Plan(mesh, body, completion, in_tree, out_tree, names, limits, orders, donated)
