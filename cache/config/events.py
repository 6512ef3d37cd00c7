"""Settings of fresh events: the section `[events]`, which night and service share."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cache.config.section import Count, section

Durability = Literal["any", "everysec", "always"]


@section
class EventsConfig:
    """Fresh events of users, in `[events]`: taken in by the service, answered with at once, read by the next night."""

    enabled: bool = False
    """True if events are taken in; generations made from then on hold what their users' lists were computed from."""
    namespace: str = ""
    """Namespace whose events count; empty: the own one. Nights of an experiment's arm name their control's."""
    durability: Durability = "any"
    """Demand on Redis before an event is accepted: `always` has written it to disk, `everysec` does within a second,
    `any` whatever that Redis' own settings say (the answer tells)."""
    stream_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Bytes of Redis that accepted events may take; beyond it more are refused, 429 `events_full`. Room comes when
    nights have taken events over and all generations that are kept have them, so it has to hold what comes within
    `keep` + 2 nights. Each worker of the service keeps up to as many bytes of them in memory."""
    keep_s: PositiveFloat = 172_800.0
    """Seconds for which an event's id makes a repetition none, and for which events that a night has are kept."""
    keep_values_days: PositiveFloat = 7.0
    """Days before a night's cut within which an attribute must have been set by an event to count in it; from then on
    the team's table counts again. More than lie between two exports of the table."""
    of_one: Count = 1_000
    """Number of events of one user, or of one item, within `keep_s`; more are rejected as `too_many`."""
    event_bytes: Annotated[int, Field(ge=256, le=4_096)] = 4_096
    """Bytes of the largest event, no more than 4,096: the stream's bytes are judged by a sample, which errs where sizes
    differ much."""
    batch: PositiveInt = 1_000
    """Number of events in one request."""
    ahead_s: NonNegativeFloat = 300.0
    """Seconds that an event's time may be ahead of the service's clock."""
    rejected: Count = 10_000
    """Number of rejected events that are kept with their reasons, the newest."""
    exact_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """Bytes of item vectors up to which answers with events are searched exactly; of a larger catalogue the index
    answers, and they are marked `approximate`. Each worker needs as much again, and a quarter."""

    new_items: Count = 1_024
    """Number of items that events brought and no night has seen, the newest, which answers may name; of these each
    worker keeps ids and vectors, and compares them with every list that it computes."""

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "EventsConfig":
        """The section [events] of the file that LARDER_CONFIG names."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.section("events"), file, environ, section_name="events")
