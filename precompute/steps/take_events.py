"""Step `take_events`: writes the stream's new events to files in the store, for `begin` to read.

It runs before the generation is named, and only if events are enabled. Its result is passed to `begin`, so that a retry
of `begin` reads the same events.
"""

from precompute.config.settings import NightConfig
from precompute.features import take_events_step
from precompute.partitions.night_input import TakenEvents


def run(config: NightConfig) -> TakenEvents:
    """Write the stream's new events into the store; return their number, and the position that the files reach."""
    return take_events_step()(config)
