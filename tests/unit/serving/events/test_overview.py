"""Events of several workers as one: each figure as bad, and as far, as the last of them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.errors import InvalidInput
from cache.format.stream_position import Position
from serving.dashboard.counters import EVENT_NUMBER_FIELDS, EVENT_TEXT_FIELDS, merge_event_rows
from serving.events.attach import EventOverview
from serving.events.counts import HELP_TEXT_BY_GAUGE as GAUGES


def row(**changes: Any) -> dict[str, Any]:
    """A worker that is fine."""
    numbers = dict.fromkeys(EVENT_NUMBER_FIELDS, 1.0)
    texts = {
        "durability": "everysec", "demanded": "everysec", "writes_refused": None,
        "counted_until": "20-1", "published_until": "10-0",
    }  # fmt: skip
    return {**numbers, **texts, **changes}


def overview(persistence: str | None, published_until: str | None, *, is_held: bool = True) -> EventOverview:
    """A worker whose Redis keeps events as it says, and whose live generation has them up to a position."""
    published = None if published_until is None else SimpleNamespace(until=published_until)
    live = SimpleNamespace(manifest=SimpleNamespace(events=published))
    users = type("Users", (list,), {"last_number": Position(20, 1).number})([1, 2, 3])
    follower = SimpleNamespace(
        newer_events=SimpleNamespace(users=users, size_bytes=900),
        lag_s=lambda: 0.12345, lost_since=lambda: None, held_bytes_max=1_000,
    )  # fmt: skip
    intake = SimpleNamespace(
        redis=SimpleNamespace(
            found_durability=persistence and SimpleNamespace(persistence=persistence), demanded_durability="always"
        ),
        counts=SimpleNamespace(value_by_gauge=dict.fromkeys(GAUGES, 1.0), write_refusal=None),
    )
    holder = SimpleNamespace(served=SimpleNamespace(live=live) if is_held else None)
    return EventOverview(cast(Any, intake), cast(Any, follower), cast(Any, holder))


def test_a_worker_tells_all_that_is_shown_of_several() -> None:
    worker_row = overview("everysec", "10-0").to_json()

    assert set(worker_row) == {*EVENT_NUMBER_FIELDS, *EVENT_TEXT_FIELDS}
    assert (worker_row["lag_s"], worker_row["users"]) == (0.123, 3)
    assert (worker_row["held_bytes"], worker_row["held_max_bytes"]) == (900, 1_000)
    assert (worker_row["durability"], worker_row["demanded"]) == ("everysec", "always")
    assert (worker_row["counted_until"], worker_row["published_until"]) == ("20-1", "10-0")


def test_a_worker_tells_events_that_their_redis_lost() -> None:
    worker = overview("everysec", "10-0")
    assert worker.problem() is None

    cast(Any, worker.follower).lost_since = lambda: Position(10, 0)

    assert "without events that were accepted after position 10-0" in str(worker.problem())


@pytest.mark.parametrize(("published_until", "is_held"), [(None, True), ("10-0", False)])
def test_a_worker_without_a_generation_that_has_events_tells_no_position_of_it(
    published_until: str | None, is_held: bool
) -> None:
    worker_row = overview(None, published_until, is_held=is_held).to_json()

    assert worker_row["published_until"] is None and worker_row["durability"] is None


def test_without_an_intake_there_is_no_overview_of_events() -> None:
    assert merge_event_rows([]) is None
    assert merge_event_rows([None, {}]) is None


def test_every_figure_is_that_of_the_last_worker() -> None:
    late = row(lag_s=7.5, held_bytes=900.0, counted_until="9-9", published_until="3-0")
    merged_row = merge_event_rows([row(), None, late, row(stream_bytes=50.0)])

    assert merged_row is not None and set(merged_row) == {*EVENT_NUMBER_FIELDS, *EVENT_TEXT_FIELDS}
    assert (merged_row["lag_s"], merged_row["held_bytes"], merged_row["stream_bytes"]) == (7.5, 900.0, 50.0)
    # Positions are compared as numbers, not as text: "9-9" is before "20-1".
    assert (merged_row["counted_until"], merged_row["published_until"]) == ("9-9", "3-0")


def test_one_worker_whose_redis_keeps_too_little_speaks_for_all() -> None:
    merged_row = merge_event_rows([row(), row(up=0.0, durability="none"), row()])

    assert merged_row is not None
    assert (merged_row["up"], merged_row["durability"], merged_row["demanded"]) == (False, "none", "everysec")


def test_what_no_worker_has_looked_at_is_not_known() -> None:
    unknown = row(**dict.fromkeys(("up", "stream_bytes", "durability", "published_until")))
    merged_row = merge_event_rows([{"counted_until": "0-0"}, unknown])

    assert merged_row is not None
    assert [merged_row[field_name] for field_name in ("up", "stream_bytes", "durability", "published_until")] == [
        None
    ] * 4
    assert merged_row["counted_until"] == "0-0"


def test_what_is_no_position_is_refused() -> None:
    with pytest.raises(InvalidInput):
        merge_event_rows([row(counted_until="<script>")])
