"""Mutants: what is changed, on which tests it is tried, and what is written down of those that survive."""

import ast
import types

import pytest

pytest.importorskip("mutmut", reason="mutants need its operators: make mutants-env")
pytest.importorskip("coverage", reason="mutants need coverage by test: make mutants-env")

from tests.mutants import trial
from tests.mutants.__main__ import OTHER_LIMIT_S, UNIT_LIMIT_S, covering
from tests.mutants.mutations import MutableModule, Mutant, drawn
from tests.mutants.results import EQUIVALENT, Row, read_verdicts, summary, without_kills
from tests.mutants.subjects import SUBJECTS, MeasuredTest
from tests.unit.test_layering import ROOT

SOURCE = '''
LIMIT = 3

class Shop:
    """Sells."""

    @staticmethod
    def is_open(hour: int = 9) -> bool:
        log.info("asked %d", hour)
        if hour < 0:
            raise ValueError("an hour is not negative")
        return hour >= 8
'''


def changes(text: str) -> list[str]:
    """All changes of a module."""
    module = MutableModule("shop.py", text)
    mutants = [module.mutant(number) for number in range(len(module))]
    return [mutant.change for mutant in mutants if mutant]


def test_what_a_function_does_is_changed_and_no_word_of_what_it_says() -> None:
    shop_changes = changes(SOURCE)

    assert "return hour >= 8  =>  return hour > 8" in shop_changes
    assert "return hour >= 8  =>  return hour >= 9" in shop_changes
    assert "if hour < 0:  =>  if hour <= 0:" in shop_changes
    text = " ".join(shop_changes)
    assert "LIMIT" not in text and "log" not in text and "XX" not in text and "def" not in text


def test_a_smaller_count_draws_the_first_ones_of_a_greater() -> None:
    module = MutableModule("shop.py", SOURCE)

    fewer_keys, more_keys = ([mutant.key for mutant in drawn([module], 7, count)] for count in (3, 5))

    assert len(fewer_keys) == 3 and more_keys[:3] == fewer_keys and len(set(more_keys)) == 5


def test_a_change_is_put_into_the_live_function(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a module of this process, with its own folder as the root
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    path = f"{tmp_path}/shop.py"
    shop = types.ModuleType("shop")
    shop.log = types.SimpleNamespace(info=lambda *_: None)  # type: ignore[attr-defined]
    exec(compile(SOURCE, path, "exec"), shop.__dict__)  # noqa: S102
    is_open = shop.Shop.is_open
    assert is_open(8)

    # When a mutant that changes a bound is installed
    module = MutableModule("shop.py", SOURCE)
    mutants = (module.mutant(number) for number in range(len(module)))
    mutant = next(mutant for mutant in mutants if mutant and "hour > 8" in mutant.change)
    functions = {(path, "Shop.is_open", mutant.function_line): [is_open]}

    # Then code that already holds the function runs the change
    assert trial.install_mutant(mutant, functions) and not is_open(8) and is_open(9)


def mutant_of(*lines: int) -> Mutant:
    """A mutant of these lines."""
    return Mutant("shop.py", 0, "Shop.is_open", 7, lines, "a  =>  b", "")


def test_unit_tests_come_first_and_a_case_of_each_before_second_ones() -> None:
    def measured(test: str, seconds: float, *lines: int) -> MeasuredTest:
        return MeasuredTest(test, seconds, {"shop.py": lines})

    tests = [
        measured("tests/unit/test_a.py::test_a[1]", 0.1, 10),
        measured("tests/unit/test_a.py::test_a[2]", 0.2, 10),
        measured("tests/unit/test_b.py::test_b", 0.3, 10),
        measured("tests/unit/test_c.py::test_c", 0.4, 11),
        measured("tests/unit/test_d.py::test_d", UNIT_LIMIT_S, 10),
        measured("tests/integration/test_e.py::test_e", OTHER_LIMIT_S, 10),
        measured("tests/integration/test_f.py::test_f", OTHER_LIMIT_S, 10),
    ]

    names = [test.test.rpartition("::")[2] for test in covering(mutant_of(10, 9), tests)]

    assert names == ["test_a[1]", "test_b", "test_a[2]", "test_e"]
    assert [test.test[-6:] for test in covering(mutant_of(12, 11), tests)] == ["test_c"]
    assert covering(mutant_of(13), tests) == []


def row(change: str, kind: str, test: str = "", passed: tuple[str, ...] = ()) -> Row:
    """What became of a mutant."""
    return Row(f"shop.py:{change}", "", "shop.py", 1, "f", change, kind, test, passed, 0.5)


def test_a_summary_counts_what_can_be_killed_and_lists_what_was_not() -> None:
    rows = [
        row("a", "killed", "t1"), row("b", "timed out", "t1"), row("c", "survived"),
        row("d", "survived"), row("e", "not covered"), row("f", "invalid"),
    ]  # fmt: skip
    verdicts = {("shop.py", "f", "c"): f"{EQUIVALENT}nothing sees it"}

    heading, *survivors = summary("shop", 3, rows, verdicts).splitlines()

    assert "shop, seed 3: 5 mutants, 50.0 % killed (66.7 % of those that a test runs)" in heading
    assert "1 survived, 1 equivalent, 1 not covered" in heading
    assert [line.split("\t")[0] for line in survivors] == ["not covered", "survived"]


def test_tests_that_ran_mutants_and_killed_none_are_listed() -> None:
    tests = [MeasuredTest(name, 0.25, {"shop.py": [1]}) for name in ("t1", "t2", "t3")]
    rows = [row("a", "killed", "t1", ("t2",)), row("b", "survived", "", ("t1", "t2"))]

    assert without_kills(rows, tests) == "t2\t2\t0.250\n"


def test_modules_and_tests_of_subjects_are_there() -> None:
    for name, subject in SUBJECTS.items():
        for part in (*subject.modules, *subject.tests):
            assert (ROOT / part).exists(), f"{name}: {part}"
        assert any(test.startswith("tests/unit/") for test in subject.test_files())


def test_a_survivor_is_of_a_function_that_there_is_and_has_a_reason_or_a_test() -> None:
    for (module, function, change), verdict in read_verdicts().items():
        tree: ast.AST = ast.parse((ROOT / module).read_text())
        for name in function.split("."):
            named = [node for node in ast.walk(tree) if getattr(node, "name", None) == name]
            assert named, (module, function)
            tree = named[0]
        assert "  =>  " in change, (module, change)
        if verdict.startswith(EQUIVALENT):
            assert len(verdict) > len(EQUIVALENT) + 15, verdict
        else:
            file, _, test = verdict.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), verdict
