"""Words of answers for what is unusual: each declared once, and told by the same word everywhere."""

from collections.abc import Iterable

import pytest

from cache.tiers.reads import DescribedEnum, MissReason
from serving.metrics.collectors import COUNTED_MISS_REASONS
from serving.requests.reasons import PUBLIC_MISS_REASONS, LiveReason, StaleReason
from tests.unit.test_layering import ROOT


@pytest.mark.parametrize(
    ("field", "enum_members"),
    [("reason", PUBLIC_MISS_REASONS), ("live", LiveReason), ("stale", StaleReason)],
    ids=["reason", "live", "stale"],
)
def test_the_reference_page_lists_every_word_with_its_meaning(
    field: str, enum_members: Iterable[DescribedEnum]
) -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()

    _, table = page.split(f"| `{field}` | says |\n|---|---|\n")
    rows = [f"| `{member}` | {member.meaning} |" for member in enum_members]

    assert table.split("\n\n")[0] == "\n".join(rows)


def test_metrics_count_the_words_that_answers_tell() -> None:
    assert set(COUNTED_MISS_REASONS) < set(PUBLIC_MISS_REASONS)
    assert {reason.public_reason for reason in MissReason} == {*PUBLIC_MISS_REASONS}
    assert {reason for reason in MissReason if reason.public_reason == MissReason.NOT_IN_GENERATION} == {
        reason for reason in MissReason if reason.traits.is_nowhere
    }
    assert {"l2_timeout", "breaker_open"} <= set(map(str, COUNTED_MISS_REASONS))
    assert "deadline" not in set(MissReason)
