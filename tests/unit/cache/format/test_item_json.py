from collections.abc import Sequence

import numpy as np
import pytest

from cache.format import item_table
from cache.format.item_table import ItemJsonTexts


def names(ordinals: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.uint32]]) -> list[str]:
    return [f'item "{ordinal}"' for ordinal in ordinals]


def test_every_ordinal_has_its_own_json_whatever_was_asked_before() -> None:
    texts = ItemJsonTexts(50, names)

    for row in ([3, 4, 3], [4, 9, 0], [49, 3, 9]):
        ordinals = np.array([row], np.uint32)
        expected = [b'"item \\"%d\\""' % ordinal for ordinal in row]
        assert texts.json_rows(ordinals) == [expected]
        assert texts.json_lines(ordinals) == [b",".join(expected)]


def test_no_more_ids_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_table, "JSON_TEXTS_MAX", 10)
    texts = ItemJsonTexts(100, names)

    for first in range(0, 100, 5):
        texts.json_rows(np.arange(first, first + 5, dtype=np.uint32)[None])
        kept_count = (
            0 if texts._json_by_ordinal is None else sum(item_text is not None for item_text in texts._json_by_ordinal)
        )
        assert kept_count <= 10
