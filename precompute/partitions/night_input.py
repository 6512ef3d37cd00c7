"""Input of a night: its sources, and what a feature adds to them: files, interactions and values of entities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple, TypedDict

from cache.format.item_table import ItemTable
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.sources.erasures import NO_ERASURES, ErasedEntities
from precompute.sources.features import NO_ENTITY_VALUES, EntityValues
from precompute.sources.files import InputEntry, SourceFile
from precompute.sources.readers import Interactions
from precompute.sources.unusable import UnusableRows

FurtherInteractions = Callable[[int, UnusableRows], Iterator[Interactions]]
"""Function that yields batches of a feature's interactions from this file number on; events have positions."""


def no_further_interactions(_first_file: int, _unusable: UnusableRows) -> Iterator[Interactions]:
    """Yield no interactions."""
    return iter(())


class NightValues(NamedTuple):
    """Values that events set: inputs of models for users and items, and `item_attribute_values` for filters.

    `event_item_ids` are items for which events set all inputs that the models need; `unlisted_item_ids` are those of
    them that no source table has. `user_values_digest` is the digest of the users' values.
    """

    user_values: EntityValues
    item_values: EntityValues
    item_attribute_values: EntityValues
    event_item_ids: frozenset[bytes]
    unlisted_item_ids: frozenset[bytes]
    user_values_digest: str


NO_EVENT_VALUES: Final = NightValues(NO_ENTITY_VALUES, NO_ENTITY_VALUES, NO_ENTITY_VALUES, frozenset(), frozenset(), "")

CollectValues = Callable[[NightConfig, Bundle, ErasedEntities, UnusableRows, int], NightValues]
"""Function that returns the values set up to a cut (Unix seconds), without erased entities; notes unusable values."""


def collect_no_values(
    _config: NightConfig, _bundle: Bundle, _erased: ErasedEntities, _unusable: UnusableRows, _cut_s: int
) -> NightValues:
    """Return no values."""
    return NO_EVENT_VALUES


class TakenEvents(TypedDict):
    """Result of `take_events`: the position up to which the files have all events, and the counts of this run."""

    events_until: str
    events: int
    left_out: int
    unreadable: int


class EventsEntry(TypedDict):
    """Events that a night read: position of the last one, and number of files."""

    until: str
    files: int


class EventFields(TypedDict, total=False):
    """Fields of the report of `begin` in a night that reads events."""

    events: EventsEntry
    events_namespace: str


@dataclass(frozen=True, slots=True)
class FurtherInput:
    """Input that a feature adds; `newest_unix_s` is the Unix time of its newest entry, None if unknown.

    `report_fields` are fields of the report of `begin`.
    """

    files: tuple[SourceFile, ...] = ()
    newest_unix_s: int | None = None
    report_fields: EventFields = field(default_factory=EventFields)
    interactions: FurtherInteractions = no_further_interactions
    values: CollectValues = collect_no_values


NO_FURTHER_INPUT: Final = FurtherInput()


@dataclass(frozen=True, slots=True, eq=False)
class NightInput:
    """Input of a night: the sources up to a cut, a feature's further input without a cut, and the erased entities.

    `interaction_files` are the files of interactions, None for those that the sources name; `pinned_inputs` are all
    input files with their checksums, interactions first.
    """

    config: NightConfig
    items: ItemTable
    cutoff_at: datetime | None = None
    erased: ErasedEntities = NO_ERASURES
    interaction_files: Sequence[SourceFile] | None = None
    pinned_inputs: Sequence[InputEntry] = ()
    further: FurtherInput = NO_FURTHER_INPUT
    values: NightValues = NO_EVENT_VALUES
