"""Settings of events: the section `[events]`, which the night and the service share."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cache.config.section import Count, section

Durability = Literal["any", "everysec", "always"]


@section
class EventsConfig:
    """Settings of events, in `[events]`: the service accepts events and answers with them.

    The next night reads them.
    """

    enabled: bool = False
    """True if the service accepts events; generations made while this is set also store the inputs that users' lists
    were computed from."""
    namespace: str = ""
    """Namespace whose events are used; empty: this namespace's own. Nights of an experiment's arm name the control's
    namespace."""
    durability: Durability = "any"
    """Durability that Redis must have before an event is accepted: `always` (written to disk first), `everysec`
    (written within a second) or `any` (any setting of that Redis; the answer states it)."""
    stream_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Largest size of accepted events in Redis, in bytes; when it is reached, further events are refused with 429
    `events_full`. Space becomes free when nights have taken events over and all kept generations include them, so it
    must hold the events of `keep` + 2 nights. Each worker of the service keeps up to the same number of bytes in
    memory."""
    keep_s: PositiveFloat = 172_800.0
    """Seconds for which an event's id is remembered, to ignore repetitions, and for which events that a night has taken
    over are kept."""
    keep_values_days: PositiveFloat = 7.0
    """Days before a night's cut within which an event must have set an attribute for the night to use that value; for
    older values the feature table counts again. Must exceed the time between two exports of the feature table."""
    of_one: Count = 1_000
    """Largest number of events of one user, or of one item, within `keep_s`; further ones are rejected as
    `too_many`."""
    event_bytes: Annotated[int, Field(ge=256, le=4_096)] = 4_096
    """Largest size of one event in bytes, at most 4,096: the stream's size is estimated from a sample, which is wrong
    if event sizes differ much."""
    batch: PositiveInt = 1_000
    """Largest number of events in one request."""
    ahead_s: NonNegativeFloat = 300.0
    """Seconds that an event's time may be ahead of the service's clock."""
    rejected: Count = 10_000
    """Number of rejected events that are kept with their reasons; newer ones replace the oldest."""
    exact_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """Bytes of item vectors up to which answers with events come from an exact search; a larger catalogue is searched
    by the index, and its answers are marked `approximate`. Each worker needs 1.25 times these bytes in addition."""

    new_items: Count = 1_024
    """Largest number of new items (items that an event brought and no night knows) that answers may name; the newest
    are kept. Each worker keeps their ids and vectors and compares them with every list that it computes."""

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "EventsConfig":
        """Return the section [events] of the file that LARDER_CONFIG names."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.section_values("events"), file, environ, section_name="events")
