from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.format import item_table
from cache.format.item_table import ItemJsonRows, ItemJsonTexts


@given(names=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=30), k=st.integers(1, 4), data=st.data())
def test_lines_are_the_json_of_the_ids_whatever_these_hold(names: list[str], k: int, data: st.DataObject) -> None:
    """NUL, line breaks, quotes and every length: what cannot be kept at one width is written another way."""
    longest = max(len(name.encode()) for name in names)
    texts = ItemJsonTexts(
        len(names), lambda ordinals: [names[ordinal] for ordinal in ordinals], longest_id_bytes=longest
    )

    for _ in range(3):
        rows = data.draw(
            st.lists(st.lists(st.integers(0, len(names) - 1), min_size=k, max_size=k), min_size=1, max_size=5)
        )
        expected = [b",".join(orjson.dumps(names[ordinal]) for ordinal in row) for row in rows]
        assert texts.json_lines(np.array(rows, np.uint32)) == expected


def test_no_more_ids_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_table, "TEXT_ROWS_MAX", 10)
    read: list[int] = []

    def names(ordinals: Sequence[int] | np.ndarray[Any, Any]) -> list[str]:
        read.extend(int(ordinal) for ordinal in ordinals)
        return [f"i-{ordinal}" for ordinal in ordinals]

    lines = ItemJsonRows(100, 4, names)
    for first in range(0, 95, 5):
        row = np.arange(first, first + 5, dtype=np.uint32)
        for _ in range(2):  # the second time from what is kept
            assert lines.of(row[None]) == [b",".join(b'"i-%d"' % ordinal for ordinal in row)]
        assert np.count_nonzero(lines._text_table._slots) <= 10

    assert read == list(range(95)) and len(lines._text_table._texts) == 11
    assert lines.of(np.arange(20, dtype=np.uint32)[None]) is None, "more at once than has room"
