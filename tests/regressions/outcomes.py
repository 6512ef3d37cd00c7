"""Pytest plugin that runs only the named tests and writes how each one ended as soon as it has.

A line of the file of outcomes is JSON: `{"started": id}`, or an `Outcome` by its fields. A test that hangs is ended
after `--case-timeout` seconds, so that those behind it are run.
"""

import json
import re
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import pytest

SHOWN_BY_PRODUCT = ("assertion", "exception", "timeout")
"""Kinds of failure by what the product did: no further case can show more."""
PRODUCT = ("cache", "precompute", "serving", "dags", "infra")
# Messages of Python about a name, an argument or a field that the code of an older commit lacks, and of Larder and its
# command line about an unknown setting or option.
_LACKS_A_SETTING = re.compile(r"^(unknown setting|unrecognized arguments)")
_LACKS_A_NAME = re.compile(
    r"has no attribute|unexpected keyword argument|required (positional|keyword-only) argument"
    r"|positional arguments? but|is not defined|does not have the attribute|takes no arguments"
)


class Outcome(NamedTuple):
    """How a test ended: `passed`, `skipped`, or the kind of its failure, with the exception's text."""

    test: str
    kind: str
    text: str


class OutOfTimeError(BaseException):
    """A test took too long; not an Exception, so that no handler of these goes on."""


def kind_of_failure(error: BaseException, trace: TracebackType | None, root: Path) -> str:
    """Return how strong a proof the failure is: `assertion`, `exception`, `timeout`, `interface` or `import`.

    An exception that the product raises tells how it behaved. An `interface` that is missing, as a whole module that
    cannot be imported, tells only that the code was another.
    """
    if isinstance(error, ImportError):
        return "import"
    if isinstance(error, OutOfTimeError):
        return "timeout"
    if isinstance(error, AssertionError | pytest.fail.Exception):
        return "assertion"
    if _LACKS_A_SETTING.search(str(error)):
        return "interface"
    last_file = Path()
    while trace is not None:
        last_file = Path(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    is_in_product = last_file.is_relative_to(root) and (last_file.relative_to(root).parts[0] in PRODUCT)
    is_name = isinstance(error, AttributeError | TypeError | NameError)
    if is_name and not is_in_product and _LACKS_A_NAME.search(str(error)):
        return "interface"
    return "exception"


class Outcomes:
    """Selects tests, limits their time and writes their outcomes."""

    def __init__(self, selected_tests: list[str], file: Path, timeout_s: float, root: Path) -> None:
        self._selected_tests = selected_tests
        self._file = file
        self._timeout_s = timeout_s
        self._root = root
        self._failed: set[str] = set()
        self._tests_shown_by_product: set[str | None] = set()

    def _write(self, line: object) -> None:
        with self._file.open("a") as lines:
            lines.write(f"{json.dumps(line)}\n")

    def _row(self, test: str) -> str | None:
        """Return the chosen test that this one is, or is a case of."""
        return next((row for row in (test, test.partition("[")[0]) if row in self._selected_tests), None)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the chosen tests."""
        deselected_items = [item for item in items if self._row(item.nodeid) is None]
        items[:] = [item for item in items if self._row(item.nodeid) is not None]
        config.hook.pytest_deselected(items=deselected_items)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Give each chosen test of a module that is skipped or cannot be collected the module's outcome."""
        report = yield
        if not report.passed:
            lines = str(report.longrepr).strip().splitlines()
            errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            text = errors[0] if errors else lines[-1]
            kind = "skipped" if report.skipped else "collection"
            if text.startswith(("ImportError", "ModuleNotFoundError")):
                kind = "import"
            elif _LACKS_A_NAME.search(text):
                kind = "interface"
            module = collector.nodeid.partition("::")[0]
            for test in self._selected_tests:
                if test.partition("::")[0] == module:
                    self._write(Outcome(test, kind, text)._asdict())
        return report

    @pytest.hookimpl(tryfirst=True, specname="pytest_runtest_protocol")
    def pytest_leave_out_what_is_shown(self, item: pytest.Item) -> bool | None:
        """Skip further cases of a test that has failed by the product's behaviour: one is enough."""
        return True if self._row(item.nodeid) in self._tests_shown_by_product else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End a test that takes too long, setup included."""
        if self._row(item.nodeid) in self._tests_shown_by_product:
            return (yield)
        self._write({"started": self._row(item.nodeid)})
        signal.signal(signal.SIGALRM, self._end_test)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _end_test(self, _signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError(f"longer than {self._timeout_s:.0f} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the outcome: a failure at once, a pass after the call."""
        report = yield
        test = self._row(item.nodeid)
        assert test is not None
        if report.failed and call.excinfo is not None and item.nodeid not in self._failed:
            self._failed.add(item.nodeid)
            error = call.excinfo.value
            kind = kind_of_failure(error, call.excinfo.tb, self._root)
            if kind in SHOWN_BY_PRODUCT:
                self._tests_shown_by_product.add(test)
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._write(Outcome(test, kind, text)._asdict())
        elif report.skipped or (report.passed and report.when == "call"):
            self._write(Outcome(test, report.outcome, str(report.longrepr or ""))._asdict())
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the run."""
    group = parser.getgroup("regressions")
    group.addoption("--chosen", type=Path, help="file with the ids of tests, one a line")
    group.addoption("--outcomes", type=Path, help="file that outcomes are appended to")
    group.addoption("--case-timeout", type=float, default=120.0, help="seconds for one test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the outcomes of this run."""
    selected_tests = config.getoption("--chosen").read_text().splitlines()
    plugin = Outcomes(
        selected_tests, config.getoption("--outcomes"), config.getoption("--case-timeout"), config.rootpath
    )
    config.pluginmanager.register(plugin, "regressions-outcomes")
