"""Who may import whom: dags -> precompute -> cache <- serving."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache", "precompute", "serving", "dags")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

ALLOWED = {
    "cache": {"cache"},
    "precompute": {"precompute", "cache"},
    "serving": {"serving", "cache"},
    "dags": {"dags", "precompute", "cache"},
}
# Each of these belongs to one package, so that the others run without it.
OWNERS = {
    "airflow": "dags",
    "fastapi": "serving",
    "starlette": "serving",
    "uvicorn": "serving",
    "torch": "precompute",
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


def offences(package: str, source: str) -> set[str]:
    """Return what a file of `package` imports although it must not."""
    found = set(imported(source))
    others = found & set(PACKAGES) - ALLOWED[package]
    owned = {name for name in found if OWNERS.get(name, package) != package}
    return others | owned | found & NEVER


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]

    assert offences(package, file.read_text()) == set()


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("serving", "def f():\n    from precompute.bulk.load import load", {"precompute"}),
        ("precompute", "import serving", {"serving"}),
        ("cache", "import precompute.config, fastapi", {"precompute", "fastapi"}),
        ("precompute", "from airflow.sdk import task", {"airflow"}),
        ("cache", "from importlib import import_module\nimport_module('pickle')", {"pickle"}),
        ("dags", "from precompute import pipeline\nfrom airflow.sdk import dag", set()),
    ],
)
def test_a_planted_import_is_noticed(package: str, source: str, expected: set[str]) -> None:
    assert offences(package, source) == expected


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_evaluates_text(file: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]

    assert not {ast.unparse(call.func) for call in calls} & {"eval", "exec"}


def test_no_dag_file_is_named_like_a_package() -> None:
    # Airflow puts the folder on sys.path: dags/cache.py would hide the package from every task.
    taken = {*PACKAGES, "tests", "infra", "airflow", "redis", "numpy", "faiss", "onnx"}

    assert not {file.stem for file in (ROOT / "dags").rglob("*.py")} & taken
