"""Coverage by test: the lines of the subject's modules that each test runs, and how long it takes.

What a fixture of a module or of the session does counts for every test that asks for it, since each mutant's tests set
it up again. A file of tests is measured once and read again as long as it and the modules are the same.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import coverage
import pytest
from coverage.types import TLineNo

from tests.mutants.subjects import ROOT, MeasuredTest

Lines = dict[str, list[TLineNo]]


class Measurement:
    """Pytest plugin that writes a JSON file for each file of tests that it runs."""

    def __init__(self, modules: Sequence[str], files: Mapping[str, Path]) -> None:
        self._modules = [str(ROOT / module) for module in modules]
        self._files = files
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=self._modules, messages=False)
        self._contexts: list[str] = []
        self._context_started_at = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        self._fixtures: dict[str, list[str]] = {}
        self._fixture_lines: dict[str, Lines] = {}

    def pytest_runtestloop(self) -> None:
        """Begin to trace; what modules do at import does not count."""
        self._coverage.start()

    def _switch(self, context: str | None) -> None:
        """Count time and lines for this context from now on; None: for the one before."""
        now_s = time.perf_counter()
        if self._contexts:
            self._seconds[self._contexts[-1]] += now_s - self._context_started_at
        if context is None:
            self._contexts.pop()
        else:
            self._contexts.append(context)
        self._coverage.switch_context(self._contexts[-1] if self._contexts else "")
        self._context_started_at = time.perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Measure a fixture that tests share apart from them."""
        if fixturedef.scope == "function" or not self._contexts:
            return (yield)
        self._switch(_fixture(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Measure a test; after the last one of a file, write the measurements."""
        definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
        self._fixtures[item.nodeid] = [
            _fixture(candidates[-1]) for candidates in definitions.values() if candidates[-1].scope != "function"
        ]
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch(None)
            if nextitem is None or nextitem.path != item.path:
                self._write(str(item.path.relative_to(ROOT)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome: a test that is skipped or already fails says nothing about a mutant."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def _lines_by_context(self) -> dict[str, Lines]:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, Lines] = defaultdict(dict)
        for file in data.measured_files():
            module = str(Path(file).relative_to(ROOT))
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    lines[context].setdefault(module, []).append(line)
        self._coverage.erase()
        self._coverage.start()
        return lines

    def _write(self, test_file: str) -> None:
        lines = self._lines_by_context()
        self._fixture_lines |= {name: ran for name, ran in lines.items() if name.startswith("fixture ")}
        measured = []
        for test, fixtures in self._fixtures.items():
            ran: dict[str, set[int]] = defaultdict(set)
            for part in (lines.get(test, {}), *(self._fixture_lines.get(name, {}) for name in fixtures)):
                for module, numbers in part.items():
                    ran[module] |= set(numbers)
            seconds = self._seconds[test] + sum(self._seconds[name] for name in fixtures)
            if test in self._passed - self._failed and ran:
                by_module = {module: sorted(numbers) for module, numbers in ran.items()}
                measured.append(MeasuredTest(test, round(seconds, 4), by_module))
        self._fixtures.clear()
        file = self._files[test_file]
        file.with_suffix(".part").write_text(json.dumps(measured))
        file.with_suffix(".part").rename(file)


def _fixture(definition: pytest.FixtureDef[object]) -> str:
    return f"fixture {definition.baseid}::{definition.argname}"


def measure(modules: Sequence[str], test_files: Sequence[str], folder: Path, seed: int) -> list[MeasuredTest]:
    """Return measurements of all tests of these files that pass and run a line of the modules, quickest first."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = hashlib.sha256(b"".join((ROOT / module).read_bytes() for module in modules))
    files = {}
    for test_file in test_files:
        digest = sources.copy()
        digest.update(test_file.encode() + (ROOT / test_file).read_bytes())
        files[test_file] = folder / f"{digest.hexdigest()[:24]}.json"
    if missing := [test_file for test_file in test_files if not files[test_file].exists()]:
        pytest.main(
            [*PYTEST_ARGUMENTS, f"--hypothesis-seed={seed}", "--no-header", "-q", *missing],
            plugins=[Measurement(modules, files)],
        )
    for test_file in missing:
        if not files[test_file].exists():  # Nothing of it was run.
            files[test_file].write_text("[]")
    measured = [MeasuredTest(*row) for file in files.values() for row in json.loads(file.read_text())]
    return sorted(measured, key=lambda test: (not test.is_unit, test.seconds))


PYTEST_ARGUMENTS = (
    "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:xdist",
    "--disable-warnings", "-m", "not storm and not slow and not installs",
)  # fmt: skip
"""Arguments of every run; options of the project's own file hold as well."""
