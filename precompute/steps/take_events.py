"""Taking over of events: what the stream has behind the last file becomes files in the store, for `begin` to read.

It has no generation yet, and runs only where events are taken in. What it returns is given to `begin`, so that a retry
of that one reads the same events.
"""

from datetime import UTC, datetime

from cache.errors import ConfigError
from cache.events.position import Position
from precompute.bulk.headroom import writes_files
from precompute.config.progress import Step
from precompute.config.settings import NightConfig
from precompute.control.connection import connect_events
from precompute.erasures.erasure import Erased, all_erasures
from precompute.events.forgetting import forget_in_files
from precompute.events.taking import take


@writes_files
def run(config: NightConfig) -> Step:
    """Write the stream's new events into the store; how many, and the position up to which the files have all.

    Raises TierUnavailable where the Redis of events does not answer: a night never goes on without them unasked.
    """
    if not config.events.enabled:
        raise ConfigError(
            "[events] enabled is false: there are no events to take over", field="events"
        )
    store = config.store()
    erased = Erased.of(all_erasures(store))
    forget_in_files(
        store, erased, newest_alone=True
    )  # who wrote it may have been killed before it looked again
    with connect_events(config) as client:
        found = take(store, client, config.keyspace(), erased=erased)
    if (now := Erased.of(all_erasures(store))) != erased:  # written down while files were
        forget_in_files(store, now)
    return {
        "events_until": str(found.until), "events": found.events, "left_out": found.left_out,
        "unreadable": found.unreadable,
    }  # fmt: skip


def in_words(taken: Step) -> str:
    """Events of one try, such as "12,345 events taken over, up to 2026-01-31T00:00:00Z (1769817600000-0)"."""
    until = Position.parse(taken["events_until"])
    at = datetime.fromtimestamp(until.ms / 1000, UTC)
    told = f"{taken['events']:,} events taken over, up to {at:%Y-%m-%dT%H:%M:%SZ} ({until})"
    reasons = {"left_out": "erased", "unreadable": "that are no events"}
    others = [f"{taken[name]:,} {why}" for name, why in reasons.items() if taken[name]]
    return f"{told}; left out: {', '.join(others)}" if others else told
