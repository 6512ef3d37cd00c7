"""Builds of the C extensions that detect errors: with sanitizers (gcc), and for libFuzzer (clang)."""

import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
Extension = Literal["columns", "topk"]
SOURCES: dict[Extension, Path] = {"columns": ROOT / "cache/native/columns.c", "topk": ROOT / "cache/topk/native/topk.c"}
FOLDERS: dict[Extension, Path] = {"columns": Path("cache/native"), "topk": Path("cache/topk")}
"""Where the built file of an extension belongs."""
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
_DRIVER = Path(__file__).with_name("driver.c")
# The flags of setup.py, except for the optimisation level: no multiply-add may be fused.
_FLAGS = ["-g", "-O1", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-fno-omit-frame-pointer"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@dataclass(frozen=True)
class Clang:
    """A clang with its runtime libraries."""

    program: str
    asan: Path
    fuzzer: Path


def find_gcc() -> str | None:
    """Return gcc if it has the library of its address sanitizer."""
    program = shutil.which("gcc")
    return program if program and _library(program, "libasan.so") else None


def find_clang() -> Clang | None:
    """Return clang if it has libFuzzer and the shared library of its address sanitizer."""
    machine = os.uname().machine
    for name in ("clang", *(f"clang-{version}" for version in range(25, 13, -1))):
        program = shutil.which(name)
        if program is None:
            continue
        for ending in (f"-{machine}", ""):
            asan = _library(program, f"libclang_rt.asan{ending}.so")
            fuzzer = _library(program, f"libclang_rt.fuzzer_no_main{ending}.a")
            if asan and fuzzer:
                return Clang(program, asan, fuzzer)
    return None


def build_sanitized(gcc: str, folder: Path) -> dict[str, str]:
    """Copy the tree to `folder` with sanitized extensions; return the environment for its tests."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for part in ("cache", "dags", "infra", "precompute", "serving", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for extension, source in SOURCES.items():
        built = folder / FOLDERS[extension] / f"_{extension}{SUFFIX}"
        _run(gcc, *_FLAGS, *_SANITIZERS, "-shared", f"-I{_include()}", str(source), "-o", str(built), "-lm")
    return sanitized_environment(gcc) | {"PYTHONPATH": str(folder)}


def sanitized_environment(gcc: str) -> dict[str, str]:
    """Return the environment of a Python that loads extensions built by gcc with sanitizers."""
    libasan = _library(gcc, "libasan.so")
    assert libasan is not None
    return environment(libasan)


def build_fuzzable(clang: Clang, extension: Extension, folder: Path) -> Path:
    """Build `_EXTENSION` with the driver `_fuzzer` in the same file, whose counters libFuzzer reads."""
    objects = [folder / f"{extension}.o", folder / "driver.o"]
    include = f"-I{_include()}"
    coverage_flags = [*_SANITIZERS, "-fsanitize=fuzzer-no-link", "-shared-libasan"]
    _run(clang.program, *_FLAGS, *coverage_flags, include, "-c", str(SOURCES[extension]), "-o", str(objects[0]))
    _run(clang.program, *_FLAGS, include, "-c", str(_DRIVER), "-o", str(objects[1]))
    built = folder / f"_{extension}{SUFFIX}"
    _run(
        clang.program, "-shared", "-fsanitize=address,undefined", "-shared-libasan", "-Wl,-Bsymbolic",
        *map(str, objects), str(clang.fuzzer), "-lstdc++", "-lm", "-o", str(built),
    )  # fmt: skip
    return built


def compile_as_released(clang: Clang, extension: Extension) -> str:
    """Compile an extension with clang as setup.py does, discard the output; return clang's messages."""
    compile_command = [clang.program, "-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", f"-I{_include()}", "-c"]
    completed = subprocess.run(
        [*compile_command, str(SOURCES[extension]), "-o", os.devnull], capture_output=True, text=True, check=False
    )
    return completed.stderr


def environment(asan: Path) -> dict[str, str]:
    """Return the environment for sanitized code, without Python's own allocator, which hides overruns."""
    return os.environ | {
        "LD_PRELOAD": str(asan),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1:quarantine_size_mb=64",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }


def _include() -> str:
    return sysconfig.get_paths()["include"]


def _library(compiler: str, name: str) -> Path | None:
    """Return the path of a compiler's own library, None if it has none."""
    printed = _run(compiler, f"-print-file-name={name}").strip()
    return Path(printed) if Path(printed).is_absolute() and Path(printed).exists() else None


def _run(*argv: str) -> str:
    completed = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, f"{' '.join(argv)}: {completed.stderr}"
    return completed.stdout
