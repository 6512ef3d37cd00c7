"""PriorIndex: access to what a night can copy from its base; the only place that handles refusals to copy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.item_table import ItemTable
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT, PriorEntry
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import EarlierPartition
from precompute.releases.release_log import Releases
from precompute.reuse.base import BaseGeneration, CannotCopy, choose_base
from precompute.reuse.inputs import earlier_partition
from precompute.reuse.item_records import item_records
from precompute.reuse.items import ItemChanges, open_copied_vectors
from precompute.reuse.reproducibility import find_regrouped_alike
from precompute.reuse.shard_reuse import ShardReuse
from precompute.scoring.copies import CopiedVectors, ItemCopies, ShardScope, UserCopies

T = TypeVar("T")

DAMAGED_REASON: Final = "a file of the base is damaged or gone"


@dataclass(frozen=True, slots=True, eq=False)
class PriorIndex:
    """Data that one build can copy from its base: the partition, item vectors, records of users and items.

    `no_lists_reason` says why there is no base, or why none of its lists can be copied.
    """

    base: BaseGeneration | None
    no_lists_reason: str = ""

    @classmethod
    def choose(cls, releases: Releases, config: NightConfig, bundle: Bundle, *, generation_being_made: str) -> Self:
        """Choose the base of a build that begins."""
        return cls(*choose_base(releases, config, bundle, generation_being_made=generation_being_made))

    @classmethod
    def open(cls, build: Build) -> Self:
        """Open the base that `begin` chose."""
        return cls(BaseGeneration.open(build.config, build.need_report(BEGIN_REPORT)))

    @property
    def generation(self) -> str | None:
        """Return the id of the base, None without one."""
        return None if self.base is None else self.base.generation

    @property
    def prior_entry(self) -> PriorEntry:
        """Fields on the base in the report of `begin`."""
        has_lists = self.base is not None and self.base.has_lists
        return {"generation": self.generation, "has_lists": has_lists, "why": self.no_lists_reason}

    def _read_base(self, read_from_base: Callable[[BaseGeneration], T]) -> tuple[T | None, str]:
        """Return (data that `read_from_base` takes, ""), or (None, the reason why it cannot be copied)."""
        if self.base is None:
            return None, self.no_lists_reason
        try:
            return read_from_base(self.base), ""
        except CannotCopy as refusal:
            return None, str(refusal)
        except (CorruptArtefact, UnknownGeneration, FileNotFoundError):
            return None, DAMAGED_REASON

    def partition(self, night_input: NightInput) -> tuple[EarlierPartition | None, str]:
        """Return (the base's partition, ""), or (None, the reason why all source files must be read)."""
        return self._read_base(lambda base: earlier_partition(base, night_input))

    def item_vectors(self, bundle: Bundle, items: ItemTable, root: Path, device: str | None) -> CopiedVectors | None:
        """Return the base's vectors of items with the same inputs, None without any; `root` has the digests."""
        return self._read_base(lambda base: open_copied_vectors(base, bundle, items, root, device))[0]

    def reproducible_models(
        self, build: Build, bundle: Bundle, items: ItemTable, device: str | None
    ) -> Mapping[str, bool]:
        """Return, for each model that the base has too, whether a row has the same bits in any batch."""
        if self.base is None:
            return {}
        return find_regrouped_alike(build, self.base, bundle, items, device)

    def write_item_changes(self, build: Build, items: ItemTable) -> bool:
        """Write how the items differ from the base's; return False if they cannot be compared."""
        changes = self._read_base(lambda base: ItemChanges.since(base, items))[0]
        if changes is not None:
            changes.write(build)
        return changes is not None

    def user_copies(self, shard: ShardScope) -> UserCopies | None:
        """Return the records of users that may be copied; None if the shard has none."""
        return self._read_base(lambda base: ShardReuse.open(base, shard))[0]

    def item_copies(self, shard: ShardScope) -> ItemCopies | None:
        """Return the records of items that may be copied; None if the shard has none."""
        return self._read_base(lambda base: item_records(base, shard))[0]
