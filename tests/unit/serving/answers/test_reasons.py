"""Words of answers for what is unusual: each declared once, and told by the same word everywhere."""

from collections.abc import Iterable

import pytest

from cache.tiers.results import NOWHERE, TOLD_AS, MissReason, Word
from serving.answers.reasons import TOLD, LiveReason, Stale
from serving.metrics.miss_reasons import REASONS
from tests.unit.test_rooms import ROOT


@pytest.mark.parametrize(
    ("field", "enum_members"),
    [("reason", TOLD), ("live", LiveReason), ("stale", Stale)],
    ids=["reason", "live", "stale"],
)
def test_the_reference_page_lists_every_word_with_its_meaning(
    field: str, enum_members: Iterable[Word]
) -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()

    _, table = page.split(f"| `{field}` | says |\n|---|---|\n")
    rows = [f"| `{member}` | {member.meaning} |" for member in enum_members]

    assert table.split("\n\n")[0] == "\n".join(rows)


def test_metrics_count_the_words_that_answers_tell() -> None:
    assert set(REASONS) < set(TOLD)
    assert {*TOLD_AS} == NOWHERE - {MissReason.NOT_IN_GENERATION}
    assert {*TOLD} == {*MissReason} - {*TOLD_AS}
    assert {"l2_timeout", "breaker_open"} <= set(map(str, REASONS))
    assert "deadline" not in set(MissReason)
