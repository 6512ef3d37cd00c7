"""Rooms: packages whose imports only go down."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "cache", "cache.mrc", "cache.control", "cache.format.records", "cache.native", "cache.resp", "cache.process",
    "cache.format", "cache.store", "cache.l2.sentinel", "cache.l2", "cache.config", "cache.l2.cluster", "cache.model",
    "cache.topk", "cache.events", "cache.filters", "cache.tiers",
    "serving.arrow_ipc", "serving.answers", "serving.tracing", "serving.requests", "serving.access", "serving.client",
    "serving.admission", "serving.config", "serving.sequential", "serving.metrics", "serving.generations",
    "serving.fresh", "serving.near", "serving.rendering", "serving.usage", "serving.replica", "serving.events",
    "serving.lookup", "serving.ranking",
    "serving.experiments", "serving.quality", "serving.explain",
    "serving.dashboard", "serving.dashboard.terminal", "serving.fast_lookup", "serving.http",
    "serving.fast_http", "serving.process", "serving",
    "precompute.config", "precompute.control", "precompute.sources", "precompute.bulk", "precompute.bundles",
    "precompute.erasures", "precompute.events", "precompute.releases", "precompute.experiments",
    "precompute.partitions", "precompute.reference", "precompute.adapters", "precompute.device.kernels",
    "precompute.device",
    "precompute.builds", "precompute.reuse", "precompute.scoring", "precompute.scoring.users", "precompute.erasing",
    "precompute.gates.evidence",
    "precompute.gates.rules",
    "precompute.gates", "precompute.steps", "precompute.operations", "precompute.canary",
    "precompute.planning", "precompute.freshness",
    "precompute.cli", "precompute",
)  # fmt: skip
"""Lowest first: a room imports itself and rooms before it."""
FAST = {"serving.fast_lookup": "serving.app", "serving.fast_http": "serving.app"}
"""Rooms that exist for speed, and the one module beside their own that may know of them."""
FILES = sorted(
    file for top in ("cache", "serving", "precompute") for file in (ROOT / top).rglob("*.py")
)


def module_of(file: Path) -> str:
    """Its dotted name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def room_of(module: str) -> str:
    """The package that the module is in; a package is its own room."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of these packages that it imports anywhere, for types alone included."""
    return frozenset(_imports(ast.parse(MODULES[module].read_text())) - {module})


def _imports(tree: ast.Module) -> set[str]:
    return {name for dotted_name in _named(tree) for name in [_known(dotted_name)] if name}


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _known(name: str) -> str:
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def upward(module: str, imported: frozenset[str]) -> set[str]:
    """What of it a module must not import."""
    room = room_of(module)
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    higher_modules = {
        imported_module for imported_module in imported if room_of(imported_module) not in allowed
    }
    secret = {
        imported_module
        for imported_module in imported
        if room_of(imported_module) in FAST
        and room != room_of(imported_module)
        and module != FAST[room_of(imported_module)]
    }
    return higher_modules | secret


def test_every_room_is_known() -> None:
    assert {room_of(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module: str) -> None:
    assert upward(module, imports(module)) == set()


@pytest.mark.parametrize(
    ("module", "imported", "expected"),
    [
        ("cache.format.records.codec", "cache.store.artefacts", True),
        ("cache.store.artefacts", "cache.format.records.codec", False),
        ("serving.lookup.ladder", "serving.fast_lookup.batch", True),
        ("serving.fast_http.connection", "serving.fast_lookup.dispatcher", True),
        ("serving.app", "serving.fast_lookup.dispatcher", False),
        ("serving.bootstrap", "serving.fast_http.connection", True),
        ("precompute.scoring.shard", "precompute.steps.begin", True),
    ],
)
def test_a_planted_import_is_noticed(module: str, imported: str, *, expected: bool) -> None:
    assert bool(upward(module, frozenset({imported}))) == expected


def test_no_modules_import_each_other() -> None:
    finished_by_module: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert finished_by_module.get(module, True), " -> ".join(
            (*path[path.index(module) :], module)
        )
        if module in finished_by_module:
            return
        finished_by_module[module] = False
        for imported_module in sorted(imports(module)):
            visit(imported_module, (*path, module))
        finished_by_module[module] = True

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for(room: str) -> None:
    folder = ROOT / room.replace(".", "/")

    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
