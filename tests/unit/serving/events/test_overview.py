"""Events of several workers as one: each figure as bad, and as far, as the last of them."""

from typing import Any

import pytest

from cache.errors import InvalidInput
from serving.events.overview import NUMBERS, TEXTS, together


def row(**changes: Any) -> dict[str, Any]:
    """A worker that is fine."""
    numbers = dict.fromkeys(NUMBERS, 1.0)
    texts = {
        "durability": "everysec", "demanded": "everysec", "counted_until": "20-1", "published_until": "10-0",
    }  # fmt: skip
    return {**numbers, **texts, **changes}


def test_nobody_tells_of_events_where_none_are_taken_in() -> None:
    assert together([]) is None
    assert together([None, {}]) is None


def test_each_figure_is_that_of_the_last_worker() -> None:
    late = row(lag_s=7.5, held_bytes=900.0, counted_until="9-9", published_until="3-0")
    found = together([row(), None, late, row(stream_bytes=50.0)])

    assert found is not None and set(found) == {*NUMBERS, *TEXTS}
    assert (found["lag_s"], found["held_bytes"], found["stream_bytes"]) == (7.5, 900.0, 50.0)
    # By position, not by text: "9-9" is before "20-1".
    assert (found["counted_until"], found["published_until"]) == ("9-9", "3-0")


def test_one_worker_whose_redis_keeps_too_little_speaks_for_all() -> None:
    found = together([row(), row(up=0.0, durability="none"), row()])

    assert found is not None
    assert (found["up"], found["durability"], found["demanded"]) == (False, "none", "everysec")


def test_what_no_worker_has_looked_at_is_not_known() -> None:
    unknown = row(**dict.fromkeys(("up", "stream_bytes", "durability", "published_until")))
    found = together([{"counted_until": "0-0"}, unknown])

    assert found is not None
    assert [found[each] for each in ("up", "stream_bytes", "durability", "published_until")] == [
        None
    ] * 4
    assert found["counted_until"] == "0-0"


def test_what_is_no_position_is_refused() -> None:
    with pytest.raises(InvalidInput):
        together([row(counted_until="<script>")])
