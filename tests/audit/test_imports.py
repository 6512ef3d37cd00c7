"""The audit knows the product by its documents alone: nothing of it is imported here."""

from __future__ import annotations

import ast
from pathlib import Path

ALLOWED = {
    "__future__", "argparse", "ast", "collections", "concurrent", "contextlib", "dataclasses", "datetime", "hashlib",
    "http", "itertools", "json", "math", "os", "pathlib", "random", "shutil", "signal", "socket", "ssl",
    "struct", "subprocess", "sys", "tempfile", "threading", "time", "traceback", "typing", "urllib",
    "numpy", "onnx", "pyarrow", "pytest",
}  # fmt: skip


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or ".")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__import__":
            names.add("__import__")
    return names


def test_no_module_of_the_audit_imports_the_product() -> None:
    # given the audit's modules
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(paths) > 8

    # when their imports are listed
    imports = {path.name: _imports(path) for path in paths}

    # then they name libraries and the audit's own modules
    offences = {
        f"{path}: {name}"
        for path, names in imports.items()
        for name in names
        if name.split(".")[0] not in ALLOWED and not name.startswith("tests.audit")
    }
    assert offences == set()
