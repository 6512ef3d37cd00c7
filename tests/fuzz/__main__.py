"""`python -m tests.fuzz EXTENSION FILE ARGUMENTS...`: fuzz a built extension, with libFuzzer's arguments.

With a file of an input among the arguments only this one is run: so a finding is repeated.
"""

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType


def load(name: str, path: Path) -> ModuleType:
    """Load a module of this name from a file that holds several modules."""
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main(argv: list[str]) -> int:
    """Run until libFuzzer ends; return its exit code."""
    extension, path, arguments = argv[0], Path(argv[1]), argv[2:]
    fuzzer = load("_fuzzer", path)
    if extension == "columns":
        from tests.fuzz import columns

        target = columns.target(load("_columns", path))
    else:
        from tests.fuzz import topk

        target = topk.target(path.parent)
    code: int = fuzzer.run([sys.argv[0], *arguments], target)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
