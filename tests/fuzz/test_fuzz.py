"""The C extensions under sanitizers: with their unit tests, and with a fuzzer that follows the code it reaches.

`columns` and `topk` say what is compared with the twins in Python. An input that breaks something is written to
build/fuzz/EXTENSION, where the inputs that reached new code are kept as well: a later run begins with them. To repeat
one: `python -m tests.fuzz.again EXTENSION FILE`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.build import (
    ROOT,
    Extension,
    build_fuzzable,
    build_sanitized,
    compile_as_released,
    environment,
    find_clang,
    find_gcc,
    sanitized_environment,
)

SEED = int(os.environ.get("LARDER_SEED", "0")) % (1 << 32)
MINUTES = float(os.environ.get("LARDER_FUZZ_MINUTES", "5"))
GCC, CLANG = find_gcc(), find_clang()
NO_GCC = "no gcc with libasan here: apt-get install gcc"
NO_CLANG = "no clang with libFuzzer here: apt-get install clang libclang-rt-dev (libclang-rt-14-dev)"
COMPILED = [
    "tests/unit/cache/native", "tests/unit/cache/topk", "tests/unit/cache/tiers", "tests/unit/cache/l2",
    "tests/unit/cache/l2", "tests/unit/serving/engine/rendering", "tests/unit/precompute/sources/test_columns.py",
]  # fmt: skip
"""Tests of what is compiled, and of its twins."""
LENGTH_MAX = {"columns": 2_000, "topk": 160}
"""Bytes of an input: more than a target reads."""
_EXECUTED = re.compile(r"stat::number_of_executed_units: +(\d+)")
_COVERED = re.compile(r"cov: (\d+) ft: (\d+)")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the tree with sanitized extensions, and the environment to test it in."""
    if GCC is None:
        pytest.skip(NO_GCC)
    folder = tmp_path_factory.mktemp("sanitized")
    return folder, build_sanitized(GCC, folder)


def hold_unit_tests(sanitized: tuple[Path, dict[str, str]], tests: list[str]) -> None:
    """Fail unless these tests pass with sanitized extensions, which end the process at the first mistake."""
    folder, environ = sanitized
    loaded = (
        "import cache.native._columns as c, cache.topk.compiled as t;"
        " print(c.__file__, t.load_kernel({}).library._name)"
    )
    names = subprocess.run([sys.executable, "-c", loaded], cwd=folder, env=environ, capture_output=True, text=True)
    assert names.returncode == 0 and names.stdout.count(str(folder)) == 2, names
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--hypothesis-seed={SEED}", *tests],
        cwd=folder, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-6_000:]
    assert "runtime error" not in completed.stdout + completed.stderr


@pytest.mark.storm
def test_unit_tests_of_all_that_is_compiled_pass_under_sanitizers(sanitized: tuple[Path, dict[str, str]]) -> None:
    hold_unit_tests(sanitized, COMPILED)


@pytest.mark.skipif(GCC is None, reason=NO_GCC)
def test_a_planted_mistake_ends_the_process() -> None:
    assert GCC is not None
    planted = "import ctypes; ctypes.string_at(ctypes.create_string_buffer(b'x' * 64), 1 << 20)"

    completed = subprocess.run(
        [sys.executable, "-c", planted], env=sanitized_environment(GCC), capture_output=True, text=True
    )

    assert completed.returncode != 0 and "AddressSanitizer" in completed.stderr


@pytest.mark.skipif(CLANG is None, reason=NO_CLANG)
@pytest.mark.parametrize("extension", ["columns", "topk"])
def test_clang_compiles_an_extension_without_a_word(extension: Extension) -> None:
    assert CLANG is not None
    assert compile_as_released(CLANG, extension) == ""


def fuzz(extension: Extension, seconds: float, folder: Path) -> None:
    """Fail if inputs of so many seconds break a sanitizer's rule, or give other results than the twin."""
    if CLANG is None:
        pytest.skip(NO_CLANG)
    corpus_folder = ROOT / "build" / "fuzz" / extension
    corpus_folder.mkdir(parents=True, exist_ok=True)
    completed = subprocess.run(
        [
            sys.executable, "-m", "tests.fuzz", extension, str(build_fuzzable(CLANG, extension, folder)),
            str(corpus_folder),
            f"-max_total_time={seconds:.0f}", f"-seed={SEED or 1}", f"-artifact_prefix={corpus_folder}/broken-",
            f"-max_len={LENGTH_MAX[extension]}",
            "-len_control=0", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1",
        ],
        cwd=ROOT, env=environment(CLANG.asan), capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    assert completed.returncode == 0, f"seed {SEED or 1}\n{completed.stderr[-6_000:]}"
    executed, covered = _EXECUTED.search(completed.stderr), _COVERED.findall(completed.stderr)
    assert executed is not None and covered, completed.stderr[-2_000:]
    print(f"seed {SEED or 1}: {extension}: {executed[1]} inputs, {covered[-1][0]} edges, {covered[-1][1]} features")


def test_inputs_of_seconds_find_no_difference(tmp_path: Path) -> None:
    fuzz("columns", 4, tmp_path)


@pytest.mark.storm
@pytest.mark.parametrize("extension", ["columns", "topk"])
def test_inputs_of_minutes_find_no_difference(extension: Extension, tmp_path: Path) -> None:
    fuzz(extension, 30 * MINUTES, tmp_path)
