from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.format.item_bytes import Names
from cache.tiers.addressing import FlightKeys
from tests.fakes import GENERATION, Night


@settings(deadline=None)
@given(names=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=30), data=st.data())
@example(names=["x" * 90, "y"], data=None)
def test_names_are_the_bytes_of_the_ids_whatever_their_length(
    names: list[str], data: st.DataObject | None
) -> None:
    def ids_of(ordinals: Sequence[int] | np.ndarray[Any, Any]) -> list[str]:
        return [names[int(each)] for each in ordinals]

    found = Names(len(names), max(len(each.encode()) for each in names), ids_of)
    row = st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=2)
    rows = [[0, 1], [1, 1]] if data is None else data.draw(st.lists(row, min_size=1, max_size=4))
    for _ in range(2):  # read, then kept
        named = found.of(np.array(rows, np.uint32))
        expected = [names[each].encode() for row in rows for each in row]
        cuts = [0, *accumulate(named.sizes.ravel().tolist())]
        assert [named.data[a:b] for a, b in pairwise(cuts)] == expected
        assert cuts[-1] == len(named.data)


def test_no_two_records_share_a_flight() -> None:
    night, keys = Night(), FlightKeys()
    wants = [night.want(each) for each in night.ids[:3]]
    wants += [wants[0]._replace(key=b"0" * 16)]
    found = [keys.of(generation, each) for generation in (GENERATION, "other") for each in wants]
    assert len(set(found)) == 8 and found == [
        keys.of(generation, each) for generation in (GENERATION, "other") for each in wants
    ]
    assert keys.start(GENERATION, "a") + 2**64 - 1 < keys.start(GENERATION, "b")
