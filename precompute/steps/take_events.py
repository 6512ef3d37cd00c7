"""Taking over of events: what the stream has behind the last file becomes files in the store, for `begin` to read.

It has no generation yet, and runs only where events are taken in. What it returns is given to `begin`, so that a retry
of that one reads the same events.
"""

from datetime import UTC, datetime

from cache.errors import ConfigError
from cache.events.position import Position
from cache.format.manifest import GENERATION
from precompute.builds.build import Build
from precompute.builds.night import Night
from precompute.bulk.headroom import writes_files
from precompute.config.progress import Step
from precompute.config.settings import NightConfig
from precompute.control.connection import connect_events
from precompute.control.states import UNFINISHED
from precompute.erasures.erasure import Erased, all_erasures
from precompute.events.files import event_files
from precompute.events.forgetting import forget_in_files
from precompute.events.merging import merge
from precompute.events.stores import Stores
from precompute.events.taking import take
from precompute.releases.registry import open_releases
from precompute.reuse.base import settings_digest
from precompute.sources.files import all_files, pin


@writes_files
def run(config: NightConfig) -> Step:
    """Write the stream's new events into the store; how many, and the position up to which the files have all.

    Nights of an arm write what the control's have not written yet into the files that both read.

    Raises TierUnavailable where the Redis of events does not answer: a night never goes on without them unasked.
    """
    if not config.events.enabled:
        raise ConfigError(
            "[events] enabled is false: there are no events to take over", field="events"
        )
    stores, keys = Stores.of(config), config.of_events().keyspace()
    store = stores.own
    erased = Erased.of(all_erasures(store))
    forget_in_files(
        store, erased, newest_alone=True
    )  # who wrote it may have been killed before it looked again
    with connect_events(config) as client:
        found = take(store, client, keys, erased=erased)
    merge(stores)
    if (now := Erased.of(all_erasures(store))) != erased:  # written down while files were
        forget_in_files(store, now)
    return {
        "events_until": str(found.until), "events": found.events, "left_out": found.left_out,
        "unreadable": found.unreadable,
    }  # fmt: skip


def for_night(night: Night) -> Step:
    """The step as a night takes it: a repeat of one that was killed goes on with the events that this one had."""
    found = run(night.config)
    cut = night.data_until or night.config.data_until or night.run_after
    until = _unfinished_until(night.config, cut)
    return found if until is None else {**found, "events_until": until}


def _unfinished_until(config: NightConfig, cut: str | None) -> str | None:
    """Position of the newest unfinished generation of this cut, of these settings and of the team's own inputs."""
    settings, own = settings_digest(config), None
    with open_releases(config) as releases:
        for generation in sorted(releases.store.names("generations"), reverse=True):
            is_one = GENERATION.fullmatch(generation) is not None
            if not is_one or releases.state(generation) not in UNFINISHED:
                continue
            begun = Build(config, releases.store, generation).read_report("begin") or {}
            if (begun.get("cut"), begun.get("settings")) != (
                cut,
                settings,
            ) or "events" not in begun:
                continue
            until = str(begun["events"]["until"])
            try:
                of_events = {each.name for each in event_files(config, until).files}
            except ConfigError:  # merged since, by nights that do not know of this one
                continue
            own = own or pin(all_files(config))[1]
            if own == [each for each in begun["inputs"] if each["name"] not in of_events]:
                return until
    return None


def in_words(taken: Step) -> str:
    """Events of one try, such as "12,345 events taken over, up to 2026-01-31T00:00:00Z (1769817600000-0)"."""
    until = Position.parse(taken["events_until"])
    at = datetime.fromtimestamp(until.ms / 1000, UTC)
    told = f"{taken['events']:,} events taken over, up to {at:%Y-%m-%dT%H:%M:%SZ} ({until})"
    if not until.ms:
        told = "0 events taken over: none was accepted yet"
    reasons = {"left_out": "erased", "unreadable": "that are no events"}
    others = [f"{taken[name]:,} {why}" for name, why in reasons.items() if taken[name]]
    return f"{told}; left out: {', '.join(others)}" if others else told
