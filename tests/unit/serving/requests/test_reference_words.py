"""The reference page for a reader who met an unusual word in an answer."""

import pytest

from tests.unit.test_layering import ROOT


@pytest.mark.parametrize(
    ("field", "field_value"),
    [
        ("reason", "l2_timeout"),
        ("reason", "breaker_open"),
        ("reason", "page_missing"),
        ("reason", "nothing_to_compute_from"),
        ("live", "no_usable_input"),
        ("live", "failed"),
        ("stale", "pointer_corrupt"),
    ],
)
def test_the_reference_page_says_what_a_word_of_an_answer_means(field: str, field_value: str) -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()

    table = page.partition(f"| `{field}` | says |\n|---|---|\n")[2].partition("\n\n")[0]
    meanings = [line for line in table.splitlines() if line.startswith(f"| `{field_value}` | ")]

    assert len(meanings) == 1
