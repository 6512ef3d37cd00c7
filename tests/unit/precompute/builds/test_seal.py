"""What the manifest says of how long a night took, and of the events it read."""

from typing import cast

import pytest

from cache.config.events import EventsConfig
from precompute.builds import seal
from precompute.builds.reports import ShardReport
from precompute.builds.seal import scoring_seconds
from precompute.config.settings import NightConfig


def report(began_at: float, ended_at: float) -> ShardReport:
    return cast(ShardReport, {"began_at": began_at, "ended_at": ended_at})


@pytest.mark.parametrize(
    ("reports", "seconds"),
    [
        ([report(5, 8)], 3),
        ([report(5, 8), report(6, 10), report(10, 11)], 6),  # overlapping, then at once
        ([report(100, 103), report(5, 8)], 6),  # one was tried again long after
        ([report(5, 20), report(6, 7)], 15),  # within another
    ],
)
def test_scoring_took_as_long_as_any_shard_was_under_way(reports: list[ShardReport], seconds: float) -> None:
    assert scoring_seconds(reports) == pytest.approx(seconds)


@pytest.mark.parametrize(("events_namespace", "expected_namespace"), [("a", "a"), ("own", "")])
def test_the_stream_is_the_one_that_was_read_whatever_is_configured_since(
    events_namespace: str, expected_namespace: str
) -> None:
    config = NightConfig(namespace="own", events=EventsConfig(enabled=True, namespace="b"))

    events_read = seal._events_read(
        config, {"events": {"until": "5-1", "files": 1}, "events_namespace": events_namespace}
    )

    assert events_read is not None and (events_read.until, events_read.namespace) == ("5-1", expected_namespace)


def test_another_stream_makes_another_generation() -> None:
    def night(of: str) -> bytes:
        return NightConfig(namespace="own", events=EventsConfig(enabled=True, namespace=of)).semantic_settings_bytes()

    assert len({night(""), night("a"), night("b")}) == 3 and night("") == night("own")
    assert (
        NightConfig(events=EventsConfig(namespace="a")).semantic_settings_bytes()
        == NightConfig().semantic_settings_bytes()
    )
