"""Defects planted in nights that copy: each is found by the comparison with a full night, most by the gate as well."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.model.ranking import score
from cache.model.tower import Histories
from cache.store.artefacts import generation_path
from precompute.partitions.digests import digest_users
from precompute.partitions.partition import EarlierPartition
from precompute.reuse import base, identity, item_records, items, shard_reuse
from precompute.reuse.base import BaseShard
from precompute.reuse.items import ItemChanges
from precompute.reuse.shard_reuse import ShardReuse
from precompute.scoring import copies, user_reading
from precompute.scoring.copies import CopyDecisions
from tests.integration.changed.month import Month, spoil
from tests.integration.changed.prepared import Prepared, judged, redigested

Patch = pytest.MonkeyPatch


def stale_digest(patch: Patch, month: Month) -> None:
    def without_features(entities: Any, hashes: Any) -> Any:
        return digest_users(replace(entities, features={}), hashes)

    redigested(month, without_features)
    patch.setattr(user_reading, "digest_users", without_features)


def capped_digest(patch: Patch, month: Month) -> None:
    def digest_capped_histories(entities: Any, hashes: Any) -> Any:
        histories = Histories(entities.history_indptr, entities.history_ordinals)
        rows = [histories.select_rows(np.array([row])).indices[-16:] for row in range(len(histories))]
        capped_histories = Histories.of(rows)
        return digest_users(
            replace(entities, history_indptr=capped_histories.indptr, history_ordinals=capped_histories.indices), hashes
        )

    redigested(month, digest_capped_histories)
    patch.setattr(user_reading, "digest_users", digest_capped_histories)


def tie_is_no(patch: Patch, month: Month) -> None:
    def above(
        vectors: Any, entering: Any, ordinals: Any, floor: Any, exclusions: Histories, metric: Any
    ) -> NDArray[np.bool_]:
        every = np.tile(np.arange(len(entering)), (len(vectors), 1))
        scores = score(vectors, entering, every, metric).astype(np.float64)
        for row in range(len(vectors)):
            excluded_ordinals = exclusions.indices[exclusions.indptr[row] : exclusions.indptr[row + 1]]
            scores[row, np.isin(ordinals, excluded_ordinals)] = -np.inf
        can_enter: NDArray[np.bool_] = (scores > floor[:, None]).any(axis=1)
        return can_enter

    for module in (shard_reuse, item_records):
        patch.setattr(module, "could_enter", above)


def with_floors(change: Callable[[Any, Any, Any], Any]) -> Callable[[Patch, Month], None]:
    def plant(patch: Patch, month: Month) -> None:
        for module in (shard_reuse, item_records):
            real = module.find_score_floors
            patch.setattr(
                module,
                "find_score_floors",
                lambda layout, records, real=real: change(layout, records, real(layout, records)),
            )

    return plant


def use_stored_floors(layout: Any, records: Any, lower_bounds: Any) -> Any:
    last = np.ldexp(records["numbers"][:, -1].astype(np.float64), records["exponent"].astype(int))
    return np.where(np.isneginf(lower_bounds), lower_bounds, last)


def last_of_short(layout: Any, records: Any, lower_bounds: Any) -> Any:
    at = np.maximum(records["count"].astype(int) - 1, 0)
    last = records["numbers"][np.arange(len(records)), at].astype(np.float64)
    last = np.where(records["count"] == 0, np.inf, last)
    return np.where(np.isneginf(lower_bounds), np.ldexp(last, records["exponent"].astype(int)), lower_bounds)


def lost_forgets(patch: Patch, month: Month) -> None:
    real = ItemChanges.compute_unlistable_mask

    def forgets(self: ItemChanges, is_allowed: Any) -> Any:
        return real(self, is_allowed) & False

    patch.setattr(ItemChanges, "compute_unlistable_mask", forgets)


def lost_forgets_filters(patch: Patch, month: Month) -> None:
    real = ItemChanges.compute_unlistable_mask
    patch.setattr(ItemChanges, "compute_unlistable_mask", lambda self, is_allowed: real(self, None))


def entering_forgets_filters(patch: Patch, month: Month) -> None:
    def entering(self: ItemChanges, was_allowed: Any, is_allowed: Any) -> Any:
        return np.flatnonzero(self.is_changed if is_allowed is None else self.is_changed & is_allowed)

    patch.setattr(ItemChanges, "find_entering_items", entering)


def ordinals_stay(patch: Patch, month: Month) -> None:
    for module in (shard_reuse, copies):
        patch.setattr(module, "renumber_items", lambda records, new_ordinals: None)


def scored_at_stays(patch: Patch, month: Month) -> None:
    real = ShardReuse.read_records

    def records(self: ShardReuse, name: str, base_positions: Any, at: int) -> Any:
        copied_records = real(self, name, base_positions, at)
        copied_records["scored_at"] = self.base_shard.records_by_table[name][base_positions]["scored_at"]
        return copied_records

    patch.setattr(ShardReuse, "read_records", records)


def new_user_is_copied(patch: Patch, month: Month) -> None:
    real = BaseShard.find_rows

    def nearest(self: BaseShard, hashes: Any) -> Any:
        positions = self.hash_digest_pairs["hash"].searchsorted(hashes)
        return np.minimum(positions, len(self.hash_digest_pairs) - 1)

    def decide_new_as_copied(self: ShardReuse, entities: Any, digests: Any, hashes: range) -> CopyDecisions:
        is_new = real(self.base_shard, entities.entity_hashes) < 0
        theirs = self.base_shard.hash_digest_pairs["digest"][nearest(self.base_shard, entities.entity_hashes)]
        return real_decide(self, entities, np.where(is_new, theirs, digests), hashes)

    real_decide = ShardReuse.decide
    patch.setattr(BaseShard, "find_rows", nearest)
    patch.setattr(ShardReuse, "decide", decide_new_as_copied)


def texts_stay(patch: Patch, month: Month) -> None:
    patch.setattr(item_records, "find_same_inputs", lambda base, model, digests, base_ordinals: base_ordinals >= 0)


def vectors_stay(patch: Patch, month: Month) -> None:
    patch.setattr(items, "find_same_inputs", lambda base, model, digests, base_ordinals: base_ordinals >= 0)


def damage_unseen(patch: Patch, month: Month) -> None:
    spoil(month.config, month.generations[-1], "tables/user_topk/0000.pages")
    patch.setattr(
        base, "fetch_checked", lambda store, name, artefact: store.fetch(generation_path(name, artefact.path))
    )


def touched_forgotten(patch: Patch, month: Month) -> None:
    real = shard_reuse._find_touched_hashes

    def half(*arguments: Any) -> Any:
        touched_hashes = real(*arguments)
        return None if touched_hashes is None else touched_hashes[::2]

    patch.setattr(shard_reuse, "_find_touched_hashes", half)


def rows_shift(patch: Patch, month: Month) -> None:
    real = EarlierPartition.shard_rows

    def rows(self: EarlierPartition, shard: int) -> Iterator[Any]:
        assert self.new_ordinals is not None
        return real(replace(self, new_ordinals=np.where(self.new_ordinals > 0, self.new_ordinals - 1, 0)), shard)

    patch.setattr(EarlierPartition, "shard_rows", rows)


def popularity_stays(patch: Patch, month: Month) -> None:
    real = EarlierPartition.remap_counts

    def count_with_base_popularity(self: EarlierPartition, count: int) -> Any:
        return self.interactions_by_item[:count].copy(), *real(self, count)[1:]

    patch.setattr(EarlierPartition, "remap_counts", count_with_base_popularity)


@dataclass(frozen=True, slots=True)
class Defect:
    """Defect planted in a world, and whether the gate finds it, too."""

    world: str
    plant: Callable[[Patch, Month], None]
    by_gate: bool = True


DEFECTS = {
    "a digest forgets features": Defect("items", stale_digest),
    "a digest ends at the cap of histories": Defect("histories", capped_digest),
    "a tie at the last place is a no": Defect("ties", tie_is_no),
    "rounding to be stored is ignored": Defect("ties", with_floors(use_stored_floors)),
    "a free place is full": Defect("places", with_floors(last_of_short)),
    "a list may hold what is gone": Defect("users", lost_forgets),
    "a list may hold what its filter lets no longer pass": Defect("filters", lost_forgets_filters),
    "what a filter lets pass now is not new": Defect("filters", entering_forgets_filters),
    "items keep the base's numbers": Defect("users", ordinals_stay),
    "records keep the base's cut": Defect("users", scored_at_stays),
    "a new user is somebody else": Defect("users", new_user_is_copied),
    "values of items are copied though their features changed": Defect("items", texts_stay),
    "vectors of items are copied though their features changed": Defect("items", vectors_stay, by_gate=False),
    "a damaged file of the base is taken": Defect("users", damage_unseen),
    "some who did something are not read": Defect("users", touched_forgotten),
    "rows that are taken over have other numbers": Defect("users", rows_shift),
    "popularity keeps the base's numbers": Defect("users", popularity_stays, by_gate=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ["users", "filters", "histories", "vectors", "places", "items", "ties"])
def test_nothing_is_found_where_nothing_is_planted(name: str, worlds: dict[str, Prepared], tmp_path: Path) -> None:
    month = worlds[name].copy(tmp_path / "copy")

    generation = month.score()

    assert month.differences(generation, worlds[name].full) == []
    assert month.reasons(generation)["copied"] > 20 or name == "places"
    measurement = judged(month.build(generation))
    assert measurement.passed and "computed again" in measurement.note


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, worlds: dict[str, Prepared], tmp_path: Path, monkeypatch: Patch) -> None:
    defect = DEFECTS[name]
    month = worlds[defect.world].copy(tmp_path / "copy")
    defect.plant(monkeypatch, month)

    generation = month.score()

    assert month.differences(generation, worlds[defect.world].full) != []
    assert judged(month.build(generation)).passed is not defect.by_gate


def test_records_that_another_device_computed_are_not_judged_by_their_bits(
    worlds: dict[str, Prepared], tmp_path: Path, monkeypatch: Patch
) -> None:
    # Given a shard scored on a host with a GPU, or with other instructions, and a gate that runs on this host
    month = worlds["users"].copy(tmp_path / "copy")
    generation = month.score()
    monkeypatch.setattr(identity, "computed_by", lambda device: "a GPU that is not here")

    measurement = judged(month.build(generation))

    assert measurement.passed and measurement.measured_value == 0 and "shards [0" in measurement.note
