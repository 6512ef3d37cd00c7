"""Costs of tables under named filters, measured on a sample: of making them, and of lookups without them."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import redis
from numpy.typing import NDArray

from cache.config.night import LIST_TABLE_KINDS
from cache.filters.filtering import SubsetSearch
from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.records import NO_ITEM
from precompute.builds.tables import configured_tables, metric_of
from precompute.filters.item_attributes import passing_filters
from precompute.partitions.catalogue import open_items
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import scratch_folder
from precompute.planning.sizes import NightShape, Pages
from precompute.planning.trial import SEARCHED_USERS, Trial, measure_time
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.user_reading import read_users

SHORT_LIST_ITEMS: Final = 10
"""Items of a short list, such as one page of an application; its cost is shown besides that of a full list."""
_SEARCH_COUNT: Final = 64
_READ_COUNT: Final = 200


@dataclass(frozen=True, slots=True)
class FilterCost:
    """Cost of a table of lists under a named filter, from a sample; seconds are processor seconds.

    `short_list_share` is the share of lists with too few passing items to fill a list, so that a lookup of a full list
    searches by vectors; `short_list_share_at_ten` is the share of lists with fewer than ten passing items.
    """

    table_name: str
    is_made_by_night: bool
    passing_item_count: int
    page_count: int
    redis_bytes: int
    night_cpu_s: float
    short_list_share: float
    short_list_share_at_ten: float
    search_cpu_s: float
    read_cpu_s: float

    @property
    def pays_from_lookups(self) -> float:
        """Full-list lookups a day from which making the table is cheaper; infinity if no list is short."""
        spared_s = self.short_list_share * (
            self.search_cpu_s + self.read_cpu_s
        )  # a search reads the entity's vector first
        return self.night_cpu_s / spared_s if spared_s > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form; `pays_from_lookups_a_day` is null if the table never pays off."""
        return {
            "table": self.table_name,
            "made": self.is_made_by_night,
            "items_passing": self.passing_item_count,
            "pages": self.page_count,
            "redis_bytes": self.redis_bytes,
            "night_cpu_s": self.night_cpu_s,
            "short_lists": self.short_list_share,
            f"short_lists_at_{SHORT_LIST_ITEMS}": self.short_list_share_at_ten,
            "search_s": self.search_cpu_s,
            "read_s": self.read_cpu_s,
            "pays_from_lookups_a_day": None if math.isinf(self.pays_from_lookups) else self.pays_from_lookups,
        }


SampledVectors = tuple[NDArray[np.float32], Histories]
"""Vectors float32 [n, dims] of sampled entities, and each entity's excluded items."""


def measure_filter_costs(
    trial: Trial, shape: NightShape, client: "redis.Redis", page_costs: Mapping[int, float]
) -> list[FilterCost]:
    """Return the costs of every declared filter on every table of lists, whether the night makes that table or not."""
    config, bundle, begin_report = trial.build.config, trial.bundle, trial.begin_report
    if not config.filters:
        return []
    items = open_items(trial.build.root, begin_report, dims=bundle.dims)
    declared_filters = passing_filters(config, trial.build.root, begin_report["attributes"], items.count)
    mask_by_filter = {
        filter_name: filter_mask.among(np.arange(items.count)) for filter_name, filter_mask in declared_filters.items()
    }
    item_vectors, pages_by_table, costs = np.asarray(items.vectors), shape.pages(), []
    read_s = _measure_read_s(client)
    for table, table_config in configured_tables(config, bundle).items():
        if table_config.kind not in LIST_TABLE_KINDS:
            continue
        sample = _sample_users(trial) if table_config.kind == "user_topk" else _sample_items(item_vectors)
        entity_count = shape.user_count if table_config.kind == "user_topk" else shape.item_count
        metric, threads = metric_of(bundle, table_config), config.threads or None
        scorer = trial.scorers.device_of_shard(0).of(items, metric)
        sample_lists = scorer.top(sample[0], table_config.k, sample[1], threads=threads)[0]
        for filter_name, mask in mask_by_filter.items():
            filtered_table = f"{table}.{filter_name}"

            search = partial(scorer.top, sample[0], table_config.k, sample[1], allowed=mask, threads=threads)
            search_time = measure_time(search)[0]
            short_share, short_share_at_ten = _short_list_shares(sample_lists, mask)
            costs.append(
                FilterCost(
                    filtered_table, filtered_table in config.table_and_filter_by_name, int(mask.sum()),
                    pages_by_table[table].page_count,
                    _sum_page_bytes(pages_by_table[table], page_costs),
                    search_time.cpu_s * entity_count / len(sample[0]), short_share, short_share_at_ten,
                    _measure_search_s(item_vectors, sample, mask, table_config.k, metric), read_s,
                )
            )  # fmt: skip
    return costs


def _sum_page_bytes(pages: Pages, cost_by_page_bytes: Mapping[int, float]) -> int:
    return round(pages.sum_costs(cost_by_page_bytes))


def _sample_users(trial: Trial) -> SampledVectors:
    work = ShardWork.of(trial.build, trial.bundle, 0, trial.scorers)
    with scratch_folder(trial.build.root / PARTITION_FOLDER) as scratch:
        chunk = work.add_tower_outputs(next(read_users(work, scratch)))
    answered_rows = np.flatnonzero(chunk.is_answered_by_model["user_tower"])[:SEARCHED_USERS]
    return chunk.outputs_by_model["user_tower"][answered_rows], chunk.seen_items.select_rows(answered_rows)


def _sample_items(item_vectors: NDArray[np.float32]) -> SampledVectors:
    ordinals = np.sort(np.random.default_rng(0).permutation(len(item_vectors))[:SEARCHED_USERS])
    return item_vectors[ordinals], Histories(np.arange(len(ordinals) + 1), ordinals)


def _short_list_shares(item_lists: NDArray[np.uint32], passing_mask: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the shares of the lists, uint32 [n, k], with fewer passing items than k, and than ten."""
    is_used = item_lists != NO_ITEM
    passing_counts = (passing_mask[np.where(is_used, item_lists, 0)] & is_used).sum(axis=1)
    is_full, width = is_used.all(axis=1), item_lists.shape[1]
    short_shares: Sequence[float] = [
        float((is_full & (passing_counts < k)).mean()) if len(item_lists) else 0.0
        for k in (width, min(SHORT_LIST_ITEMS, width))
    ]
    return short_shares[0], short_shares[1]


def _measure_search_s(
    item_vectors: NDArray[np.float32], sample: SampledVectors, passing_mask: NDArray[np.bool_], k: int, metric: Metric
) -> float:
    """Return the processor seconds of the service's search by one vector."""
    searcher, queries, exclusions = SubsetSearch(item_vectors), sample[0][:_SEARCH_COUNT], sample[1]
    passing_ordinals = np.flatnonzero(passing_mask)

    def search(sample_row: int) -> None:
        excluded_ordinals = exclusions.indices[exclusions.indptr[sample_row] : exclusions.indptr[sample_row + 1]]
        searcher.search(queries[sample_row], passing_ordinals[~np.isin(passing_ordinals, excluded_ordinals)], k, metric)

    search(0)  # the first search computes the vectors' lengths

    def all_of_them() -> None:
        for row in range(len(queries)):
            search(row)

    return measure_time(all_of_them)[0].cpu_s / len(queries)


def _measure_read_s(client: "redis.Redis") -> float:
    """Measure the median round trip of reading a record from this host's Redis, in seconds."""
    key, read_times_s = "larder:plan:read", []
    client.set(key, bytes(64 << 10))
    for offset in range(_READ_COUNT):
        started_at = time.perf_counter()
        client.getrange(key, offset, offset + 600)
        read_times_s.append(time.perf_counter() - started_at)
    client.delete(key)
    return float(np.median(read_times_s))
