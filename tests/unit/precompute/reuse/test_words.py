"""What a night's table says of its copies."""

import pytest

from precompute.builds.reports import NO_BASE_ENTRY, BaseEntry
from precompute.reuse.base import NO_VERIFIED_BASE_REASON, OTHER_BUNDLE_REASON
from precompute.reuse.reasons import base_in_words, users_in_words


@pytest.mark.parametrize(
    ("users", "expected_text"),
    [
        ({"copied": 1_360, "inputs": 30, "lost": 6, "entered": 4}, (
            "1,360 copied, 40 computed (30 for their inputs, "
            "6 for a removed or changed item in a list, 4 for an item that may enter a list)"
        )),
        ({"copied": 5, "inputs": 0}, "5 copied, 0 computed"),
        ({"copied": 0, "computed": 7}, "0 copied, 7 computed"),
    ],
)  # fmt: skip
def test_users_are_reported_by_reason(users: dict[str, int], expected_text: str) -> None:
    assert users_in_words(users) == expected_text


@pytest.mark.parametrize(
    ("base_entry", "expected_text"),
    [
        (NO_BASE_ENTRY, "no copies"),
        (
            {**NO_BASE_ENTRY, "why": NO_VERIFIED_BASE_REASON, "read_because": NO_VERIFIED_BASE_REASON},
            f"no copies: {NO_VERIFIED_BASE_REASON}",
        ),
        ({**NO_BASE_ENTRY, "generation": "g"}, "copies from g"),
        ({**NO_BASE_ENTRY, "generation": "g", "read_because": "x changed"}, "copies from g; all files read: x changed"),
        (
            {**NO_BASE_ENTRY, "generation": "g", "why": OTHER_BUNDLE_REASON},
            f"no lists copied, items and values from g: {OTHER_BUNDLE_REASON}",
        ),
    ],
)  # fmt: skip
def test_the_base_is_named_or_why_there_is_none(base_entry: BaseEntry, expected_text: str) -> None:
    assert base_in_words(base_entry) == expected_text
