"""Trials of mutants: a process that has collected the tests is forked for each, and only the fork is changed."""

import ctypes
import gc
import importlib
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import BinaryIO, NamedTuple

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.mutants.coverage_by_test import PYTEST_ARGUMENTS
from tests.mutants.mutations import Mutant
from tests.mutants.subjects import ROOT, MeasuredTest

MEMORY_BYTES = 12 * 2**30
"""Address space of a fork: a loop that no longer ends may fill it."""
_SET_SIGNAL_OF_PARENTS_DEATH = 1  # <linux/prctl.h>
SLACK_S = {True: 5.0, False: 30.0}
"""Seconds that a test may take above five times what it took; by whether it is a unit test."""


class Outcome(NamedTuple):
    """Outcome of a mutant."""

    mutant: Mutant
    kind: str
    """`killed`, `timed out`, `survived`, `not covered`, or `invalid`: no function could take it."""
    test: str = ""
    """The test that failed, or did not end."""
    passed: tuple[str, ...] = ()
    """Tests that ran the change and passed."""
    seconds: float = 0.0


class _Trial:
    """A fork that runs tests, and reports on a pipe which test it begins and how it ends."""

    def __init__(self, mutant: Mutant, tests: Sequence[MeasuredTest], run: Callable[[int], None]) -> None:
        self.mutant = mutant
        self._seconds = {test.test: 5 * test.seconds + SLACK_S[test.is_unit] for test in tests}
        self._started = time.monotonic()
        self.deadline = self._started + 60.0
        self._begun_tests: list[str] = []
        self._end = ""
        self._unread = b""
        reader, writer = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(reader)
            run(writer)
        os.close(writer)
        self.reader: BinaryIO = os.fdopen(reader, "rb", buffering=0)

    def read(self) -> bool:
        """Read the fork's reports; return whether it has more."""
        chunk = self.reader.read(65536) or b""
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            status, _, test = line.decode().partition(" ")
            if status == "begin":
                self._begun_tests.append(test)
                self.deadline = time.monotonic() + self._seconds[test]
            else:
                self._end = status
        return bool(chunk) and not self._end

    def close(self, *, is_late: bool) -> Outcome:
        """End the fork and its session; return the mutant's outcome."""
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                end(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self.reader.close()
        seconds = round(time.monotonic() - self._started, 3)
        last = self._begun_tests[-1] if self._begun_tests else ""
        if is_late and not self._end:
            return Outcome(self.mutant, "timed out", last, tuple(self._begun_tests[:-1]), seconds)
        if self._end in ("survived", "invalid"):
            return Outcome(self.mutant, self._end, "", tuple(self._begun_tests), seconds)
        # The process ended without a report: the change killed it.
        return Outcome(self.mutant, "killed", last, tuple(self._begun_tests[:-1]), seconds)


class Trials:
    """Pytest plugin that tries mutants on the collected tests instead of running them."""

    def __init__(self, mutants: Iterable[tuple[Mutant, Sequence[MeasuredTest]]], workers: int) -> None:
        mutants = list(mutants)
        self._modules = sorted({mutant.module for mutant, _ in mutants})
        self._mutants = iter(mutants)
        self._workers = workers
        self._report: Callable[[Outcome], None] = lambda _outcome: None

    def run(self, test_files: Sequence[str], seed: int, report: Callable[[Outcome], None]) -> int:
        """Collect the tests and try all mutants; returns pytest's exit code."""
        self._report = report
        return int(
            pytest.main(
                [*PYTEST_ARGUMENTS, f"--hypothesis-seed={seed}", "-q", "-s", "--no-header", *test_files], plugins=[self]
            )
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let Hypothesis neither shrink failures nor store them."""
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", settings.get_profile("untimed"), database=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the mutants, one per worker at a time."""
        items = {item.nodeid: item for item in session.items}
        for module in self._modules:
            importlib.import_module(module.removesuffix(".py").replace("/", "."))
        functions = _live_functions()
        running: dict[int, _Trial] = {}
        with selectors.DefaultSelector() as selector:
            while self._fill(running, selector, items, functions):
                wait_s = min(trial.deadline for trial in running.values()) - time.monotonic()
                finished_trials = []
                for key, _ in selector.select(max(0.0, wait_s)):
                    if not running[key.fd].read():
                        finished_trials.append((key.fd, False))
                now_s = time.monotonic()
                finished_trials += [
                    (file, True)
                    for file, trial in running.items()
                    if trial.deadline <= now_s and (file, False) not in finished_trials
                ]
                for file, is_late in finished_trials:
                    selector.unregister(file)
                    self._report(running.pop(file).close(is_late=is_late))
        return True

    def _fill(
        self,
        running: dict[int, _Trial],
        selector: selectors.BaseSelector,
        items: Mapping[str, pytest.Item],
        functions: Mapping[tuple[str, str, int], list[FunctionType]],
    ) -> bool:
        """Start trials until all workers are busy; returns whether one is running."""
        while len(running) < self._workers:
            mutant, tests = next(self._mutants, (None, ()))
            if mutant is None:
                break
            tests = [test for test in tests if test.test in items]
            if not tests:
                self._report(Outcome(mutant, "not covered"))
                continue

            def run(
                writer: int,
                mutant: Mutant = mutant,
                selected_items: Sequence[pytest.Item] = [items[test.test] for test in tests],
            ) -> None:
                _run_fork(writer, mutant, selected_items, functions)

            trial = _Trial(mutant, tests, run)
            running[trial.reader.fileno()] = trial
            selector.register(trial.reader.fileno(), selectors.EVENT_READ)
        return bool(running)


def _run_fork(
    writer: int,
    mutant: Mutant,
    items: Sequence[pytest.Item],
    functions: Mapping[tuple[str, str, int], list[FunctionType]],
) -> None:
    """Change the code, run the tests up to the first that fails, and end the process."""
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        end = "invalid"
        if install_mutant(mutant, functions):
            end = "survived"
            # With the session as the item after the last one, fixtures are not torn down: the process ends without
            # them.
            behind: list[pytest.Item] = [*items[1:], items[0].session]  # type: ignore[list-item]
            for item, following in zip(items, behind, strict=True):
                os.write(writer, f"begin {item.nodeid}\n".encode())
                reports = runtestprotocol(item, log=False, nextitem=following)
                if any(report.failed for report in reports):
                    end = "killed"
                    break
        os.write(writer, f"{end}\n".encode())
    finally:
        os._exit(0)


def _live_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """Functions of this process by file, name and first line."""
    gc.unfreeze()
    functions: dict[tuple[str, str, int], list[FunctionType]] = {}
    for value in gc.get_objects():
        if type(value) is FunctionType and value.__code__.co_filename.startswith(str(ROOT)):
            functions.setdefault(_name(value.__code__), []).append(value)
    gc.freeze()
    return functions


def _name(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def install_mutant(mutant: Mutant, functions: Mapping[tuple[str, str, int], list[FunctionType]]) -> bool:
    """Give the mutant's code to each live function with the original code; return whether there is one."""
    path = str(ROOT / mutant.module)
    function_key = (path, mutant.function, mutant.function_line)
    placed = False
    for outer in _codes(compile(mutant.source, path, "exec")):
        if _name(outer) != function_key:
            continue
        for code in _codes(outer):
            for function in functions.get(_name(code), ()):
                if len(function.__code__.co_freevars) != len(code.co_freevars):
                    continue
                function.__code__ = code
                placed = placed or code is outer
    return placed
