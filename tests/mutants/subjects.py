"""Subjects: modules whose mutants are drawn together, and the tests that are measured for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
UNIT_TESTS = "tests/unit/"
"""Tests below it are preferred; all others need a real Redis or a night."""


class MeasuredTest(NamedTuple):
    """Lines and duration of a passed test."""

    test: str
    seconds: float
    lines: Mapping[str, Sequence[int]]
    """By module."""

    @property
    def is_unit(self) -> bool:
        """Whether the test needs only this process."""
        return self.test.startswith(UNIT_TESTS)

    def runs(self, module: str, lines: Iterable[int]) -> bool:
        """Return whether the test runs one of these lines."""
        return not frozenset(lines).isdisjoint(self.lines.get(module, ()))


@dataclass(frozen=True)
class Subject:
    """Modules and tests, as files or folders of the repository."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]

    def module_files(self) -> list[str]:
        """Return the modules' Python files, sorted, without `__init__.py`, which has no functions."""
        paths = _python_files(self.modules)
        return [path for path in paths if not path.endswith("__init__.py")]

    def test_files(self) -> list[str]:
        """Files of tests, those of `tests/unit` first."""
        paths = [path for path in _python_files(self.tests) if Path(path).name.startswith("test_")]
        return sorted(paths, key=lambda path: (not path.startswith(UNIT_TESTS), path))


def _python_files(parts: Sequence[str]) -> list[str]:
    files: set[Path] = set()
    for part in parts:
        files |= set((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else {ROOT / part}
    return sorted(str(file.relative_to(ROOT)) for file in files)


SUBJECTS = {
    "ladder": Subject(
        ("serving/engine",),
        (
            "tests/unit/serving/engine",
            "tests/unit/serving/http",
            "tests/unit/serving/near",
            "tests/unit/serving/explain",
            "tests/unit/serving/usage",
            "tests/unit/serving/traffic",
            "tests/unit/serving/filters",
            "tests/unit/serving/generations/test_user_vectors.py",
            "tests/integration/http/test_serving_api.py",
            "tests/integration/http/test_hot.py",
            "tests/integration/http/test_hot_together.py",
            "tests/integration/http/test_live_provider.py",
            "tests/integration/fresh/test_answers.py",
        ),
    ),
    "tiers": Subject(
        ("cache/tiers", "cache/l2"),
        (
            "tests/unit/cache/tiers",
            "tests/unit/cache/l2",
            "tests/unit/cache/l2",
            "tests/unit/cache/native/test_loader.py",
            "tests/unit/cache/format",
            "tests/unit/serving/engine",
            "tests/unit/serving/usage",
            "tests/unit/serving/explain",
            "tests/integration/tiers/test_cluster_keys.py",
            "tests/integration/tiers/test_lead.py",
            "tests/integration/tiers/test_remote.py",
            "tests/integration/tiers/test_tier_contract.py",
        ),
    ),
    "gates": Subject(
        ("precompute/gates",), ("tests/unit/precompute/gates", "tests/integration/night/test_gate_corpus.py")
    ),
    "releases": Subject(
        (
            "precompute/releases",
            "cache/store/releases.py",
            "serving/generations/pointer_follower.py",
            "serving/generations/holder.py",
        ),
        (
            "tests/unit/precompute/releases",
            "tests/unit/cache/store",
            "tests/unit/serving/generations",
            "tests/unit/serving/traffic/test_canary_router.py",
            "tests/unit/precompute/reference",
            "tests/integration/releases/test_adopt.py",
            "tests/integration/releases/test_audit.py",
            "tests/integration/releases/test_control.py",
            "tests/integration/releases/test_races.py",
            "tests/integration/releases/test_redis_loss.py",
            "tests/integration/releases/test_release.py",
            "tests/integration/releases/test_release_canary.py",
            "tests/integration/releases/test_release_repeats.py",
            "tests/integration/releases/test_replication.py",
            "tests/integration/releases/test_restore.py",
            "tests/integration/releases/test_retire.py",
            "tests/integration/releases/test_swaps.py",
        ),
    ),
    "erasure": Subject(
        (
            "precompute/erasure",
            "precompute/sources/erasures.py",
            "cache/store/erasures.py",
            "precompute/events/stream.py",
            "cache/store/blocklist.py",
            "cache/store/artefacts.py",
            "serving/generations/refresher.py",
        ),
        (
            "tests/unit/precompute/erasure",
            "tests/unit/precompute/events",
            "tests/unit/precompute/cli",
            "tests/unit/cache/store",
            "tests/unit/serving/traffic/test_canary_router.py",
            "tests/unit/serving/generations",
            "tests/integration/night/test_erasure.py",
        ),
    ),
    "reuse": Subject(
        ("precompute/reuse", "cache/reuse.py", "precompute/builds/build.py"),
        (
            "tests/unit/precompute/reuse",
            "tests/unit/precompute/builds",
            "tests/unit/precompute/scoring",
            "tests/unit/precompute/partitions",
            "tests/unit/cache/format",
            "tests/integration/changed",
        ),
    ),
    "events": Subject(
        ("serving/events", "precompute/events"),
        (
            "tests/unit/serving/events",
            "tests/unit/serving/generations",
            "tests/unit/serving/traffic/test_canary_router.py",
            "tests/unit/serving/engine/test_event_cases.py",
            "tests/unit/cache/events",
            "tests/unit/precompute/events",
            "tests/integration/events/test_check.py",
            "tests/integration/events/test_http.py",
            "tests/integration/events/test_inbox.py",
            "tests/integration/events/test_intake.py",
            "tests/integration/events/test_lost_stream.py",
            "tests/integration/fresh/test_follower.py",
            "tests/integration/fresh/test_answers.py",
            "tests/integration/fresh/test_gaps.py",
        ),
    ),
    "filters": Subject(
        ("serving/filters", "cache/filters", "cache/model/filter_mask.py", "precompute/filters/item_attributes.py"),
        (
            "tests/unit/serving/filters",
            "tests/unit/serving/generations/test_user_vectors.py",
            "tests/unit/cache/filters",
            "tests/unit/serving/engine",
            "tests/unit/serving/http",
            "tests/unit/precompute/partitions",
            "tests/integration/http/test_filters.py",
            "tests/integration/http/test_reranking.py",
            "tests/integration/http/test_named_filters.py",
            "tests/integration/http/test_facets.py",
        ),
    ),
}
