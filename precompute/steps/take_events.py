"""Step `take_events`: writes the stream's events after the last file to files in the store, for `begin` to read.

It has no generation yet, and runs only where events are taken in. Its result is passed to `begin`, so that a retry
of that one reads the same events.
"""

from precompute.config.settings import NightConfig
from precompute.features import take_events_step
from precompute.partitions.night_input import TakenEvents


def run(config: NightConfig) -> TakenEvents:
    """Write the stream's new events into the store; return their number, and the position that the files reach."""
    return take_events_step()(config)
