"""The tree itself: small files, one reading order, one door to JAX's internals."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src" / "shardwise"
FILES = sorted(SOURCE.rglob("*.py"))
LINES = 450

# The reading order.  A module imports only those above it, at the top or in a function.  A package
# is one entry here: its modules may import each other.
ORDER = """
    errors refused _jax _jax_primitives spelling_long mesh sharding padded       # what there is
    device_tensor convert annotate manual blocks batched resolve # what users say
    messages rounds halo regroup factors program ops             # what primitives do
    spelling swap known merge pairing ranking associative share order copies
    invariants outward capture                                           # a function becomes a program
    edges varying regions complete                                    # every value gets a sharding
    tpu reshard_model reshard_moves reshard_search reshard_rounds
    reshard_emit reshard                                         # from one sharding to another
    candidates choose value windows cost accumulate notes
    partition repeats hoist stacks scans whiles control border
    crossing callbacks fft_passes                                # the program of one device
    explain plan                                                 # all that was decided
    arguments options transform api                              # spmd
    pipeline                                                     # stages of layers
    hlo nn models demo translation testing cli                   # around it
"""
NAMES = [name for line in ORDER.splitlines() for name in line.split("#")[0].split()]
POSITION = {name: i for i, name in enumerate(NAMES)}


def entry(module: str) -> str:
    """`ops.dot` -> `ops`."""
    return module.split(".")[0]


def imports(path: pathlib.Path) -> Iterator[str]:
    """The modules of this package that a file imports, those for type checkers only left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name.split(".", 1)[1] for a in node.names if _ours(a.name, "."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "shardwise":
                yield from (a.name for a in node.names)
            elif _ours(node.module, "."):
                yield node.module.split(".", 1)[1]


def _ours(module: str, after: str) -> bool:
    return module.startswith("shardwise" + after)


def ids(path: pathlib.Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_are_small(path: pathlib.Path):
    assert len(path.read_text().splitlines()) <= LINES


def test_every_module_has_a_place_in_the_order():
    present = {entry(ids(p).removesuffix(".py").replace("/", ".")) for p in FILES} - {"__init__"}
    assert sorted(present) == sorted(POSITION)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_a_module_imports_only_those_above_it(path: pathlib.Path):
    me = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if me == "__init__":
        return
    below = []
    for module in imports(path):
        # The examples, the demo and the tests' own tools are users: they may import the public names.
        if (
            module not in POSITION
            and entry(module) not in POSITION
            and me in ("demo", "nn", "testing", "translation")
        ):
            continue
        if entry(module) != me and POSITION[entry(module)] > POSITION[me]:
            below.append(module)
    assert below == []


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_one_module_touches_internals_of_jax(path: pathlib.Path):
    used = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    internal = [m for m in used if m and "._" in m and m.startswith("jax")]
    if path.name in ("_jax.py", "_jax_primitives.py"):
        assert internal != []
    else:
        assert internal == []


def test_the_core_depends_on_jax_and_numpy_only():
    """What installs without extras must import without them."""
    allowed = {"jax", "numpy", "shardwise"}
    extras = {
        "demo": {"optax", "rich"},
        "models": {"optax"},
        "testing": {"hypothesis"},
        "translation": {"optax", "orbax", "rich", "sacrebleu", "sentencepiece"},
    }
    for path in FILES:
        more = extras.get(path.relative_to(SOURCE).parts[0], set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            outside = {n.split(".")[0] for n in names} - allowed - more
            assert outside <= STANDARD, f"{ids(path)} imports {outside - STANDARD}"


STANDARD = set(__import__("sys").stdlib_module_names)
