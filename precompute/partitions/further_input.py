"""Further input of a night, behind the team's own: files, interactions and values of entities, that a feature gives."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.sources.erasures import ErasedEntities
from precompute.sources.features import NO_VALUES, EntityValues
from precompute.sources.files import SourceFile
from precompute.sources.readers import Interactions
from precompute.sources.unusable import UnusableRows

FurtherInteractions = Callable[[int, UnusableRows], Iterator[Interactions]]
"""Batches of interactions behind the team's own, from one of their files on; those with positions are events."""


def no_further(_first_file: int, _unusable: UnusableRows) -> Iterator[Interactions]:
    """Nothing behind the team's own interactions."""
    return iter(())


class NightValues(NamedTuple):
    """Values that events set, as a night uses them: models' inputs, and `attributes` of items for filters.

    `event_item_ids` are items that events made answerable, `unlisted` those of them that are in no table of the team's;
    `users_digest` is that of the users' values.
    """

    users: EntityValues
    items: EntityValues
    attributes: EntityValues
    event_item_ids: frozenset[bytes]
    unlisted: frozenset[bytes]
    users_digest: str


ValuesOf = Callable[[NightConfig, Bundle, ErasedEntities, UnusableRows, int], NightValues]
"""Values but for who was erased, those left out noted, with a cut in Unix seconds."""


def no_values(
    _config: NightConfig,
    _bundle: Bundle,
    _erased: ErasedEntities,
    _unusable: UnusableRows,
    _cut_s: int,
) -> NightValues:
    """No value of anybody."""
    return NightValues(NO_VALUES, NO_VALUES, NO_VALUES, frozenset(), frozenset(), "")


@dataclass(frozen=True, slots=True)
class FurtherInput:
    """Further input as `begin` lists it; `newest_s` (Unix seconds) is how new it is, None if that says nothing.

    `facts` are fields of the report.
    """

    files: tuple[SourceFile, ...] = ()
    newest_s: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    interactions: FurtherInteractions = no_further
    values: ValuesOf = no_values
