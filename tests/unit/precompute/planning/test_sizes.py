"""Pages, times and room foretold: against the writer's own files, and on the edges."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import Refused
from cache.records import Layout
from precompute.config.settings import GateThresholds, NightConfig, peak_generation_count
from precompute.planning.capacity import CapacityLimits, RedisNode, demand_room, judge_capacity
from precompute.planning.forecast import gpu_seconds, resize_lists
from precompute.planning.sizes import REPORTS_BYTES, NightShape, Pages
from precompute.planning.trial import TimedRun, TimeSpent, Timings, extrapolate, measure_time
from precompute.scoring.pages import PageFile, checksums_path

LAYOUT = Layout("topk", 10, "f2")
GB = 10**9


@pytest.mark.parametrize("records", [0, 1, 53, 54, 108, 1000])
def test_pages_are_those_that_the_night_writes(tmp_path, records):
    path = tmp_path / "0000.pages"
    with PageFile(path, LAYOUT, 4096) as file:
        file.append(np.zeros(records, LAYOUT.dtype))

    pages = Pages.of(records, 1, LAYOUT, 4096)

    assert pages.payload_bytes == path.stat().st_size
    assert pages.page_count == checksums_path(path).stat().st_size // 8


@settings(deadline=None)
@given(st.integers(0, 10**7), st.integers(1, 64), st.integers(4096, 1 << 20))
def test_parts_hold_all_records_but_for_rounding(records, parts, page_bytes):
    pages = Pages.of(records, parts, LAYOUT, page_bytes)

    off = abs(pages.payload_bytes - records * LAYOUT.size_bytes)
    assert off <= parts * LAYOUT.size_bytes
    assert pages.last_page_bytes < pages.full_page_bytes
    assert pages.sum_costs({size: float(size) for size in pages.page_sizes}) == pages.payload_bytes
    assert pages.sum_costs(dict.fromkeys(pages.page_sizes, 1.0)) == pages.page_count


def shape(**changes):
    settings = {
        "user_count": 1000, "item_count": 200, "dims": 8, "shard_count": 2, "page_bytes": 4096,
        "layout_by_table": {"user_topk": ("user", LAYOUT)}, "bytes_per_item_id": 7.5,
        "bytes_by_model": {"user_tower": 4000, "item_tower": 2000}, "model_item_count": 100, "model_dims": 8,
        "metric_count": 1,
    }  # fmt: skip
    return NightShape(**{**settings, **changes})


def test_a_generation_is_the_sum_of_its_files():
    night_shape = shape()

    assert night_shape.directory_bytes == 8 * (1000 + 200)
    assert night_shape.item_bytes == 1500 + 8 * 201 + 8 * 200 + 4 * 200 * 8
    assert night_shape.index_bytes == 4 * 200 * 8
    assert night_shape.fp32_bytes == 12_000  # twice the items of the bundle
    int8 = 12_000 * (1 + 4 / 8) / 4
    assert night_shape.mapped_bytes == night_shape.directory_bytes + night_shape.item_bytes + 6400 + 12_000 + int8
    pages = night_shape.payload_bytes + 8 * night_shape.pages()["user_topk"].page_count
    assert night_shape.disk_bytes == night_shape.mapped_bytes + pages + 12_000 + REPORTS_BYTES


def test_an_inverted_file_keeps_ids_and_centroids():
    flat, lists = shape(item_count=20_000, index_kind="flat"), shape(item_count=20_000)

    assert lists.index_bytes - flat.index_bytes == 8 * 20_000 + 4 * 8 * 177
    assert shape(item_count=20_000, index_kind="hnsw").index_bytes > flat.index_bytes
    assert shape(index_kind="auto").index_bytes == shape(index_kind="flat").index_bytes


def test_time_grows_along_the_line_of_two_runs():
    small, large = TimedRun(100, TimeSpent(2.0, 3.0)), TimedRun(300, TimeSpent(3.0, 5.0))

    assert extrapolate(small, large, 300) == large.spent
    assert extrapolate(small, large, 1300) == TimeSpent(8.0, 15.0)
    assert extrapolate(large, large, 600) == TimeSpent(6.0, 10.0)


@settings(deadline=None)
@given(st.floats(0, 10), st.floats(0, 10), st.floats(200, 1e9))
def test_noise_never_makes_more_work_cost_less(first, second, amount):
    time_spent = extrapolate(TimedRun(100, TimeSpent(first, first)), TimedRun(200, TimeSpent(second, second)), amount)

    assert time_spent.wall_s >= second


def test_the_processor_time_of_another_process_counts():
    ticks = iter([1.0, 3.5])

    spent, timed_result = measure_time(lambda: "done", lambda: next(ticks))

    assert timed_result == "done" and spent.cpu_s >= 2.5


def room(**changes):
    """Verdicts on four generations of 1 GB in Redis, 1 GB mapped and 2 GB on disk."""
    nodes = (
        RedisNode("primary a", 0.5, int(2.5 * GB), "maxmemory"),
        RedisNode("primary b", 0.5, int(2.5 * GB), "maxmemory", 10**8),
    )
    limits = CapacityLimits(**{"nodes": nodes, "memory_bytes": 4 * GB, "disk_bytes": 8 * GB, **changes})
    return judge_capacity(
        limits, GateThresholds(), generation_count=peak_generation_count(1),
        redis_bytes=GB, mapped_bytes=GB, disk_bytes=2 * GB,
    )  # fmt: skip


@pytest.mark.parametrize(("keep", "generations"), [(0, 4), (1, 4), (2, 5), (5, 8)])
def test_live_loading_one_refused_and_what_keep_retains_coexist(keep, generations):
    assert peak_generation_count(keep) == generations


def test_as_many_generations_as_coexist_that_just_fit_pass():
    demand_room(room())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"nodes": (RedisNode("primary", 1.0, int(4.1 * GB), "maxmemory"),)}, "redis_headroom"),
        ({"nodes": (RedisNode("primary", 1.0, 5 * GB, "maxmemory", GB),)}, "redis_headroom"),
        ({"nodes": (RedisNode("primary", 1.0, 0, ""),)}, "redis_headroom"),
        ({"memory_bytes": 4 * GB - 1}, "memory_headroom"),
        ({"disk_bytes": 8 * GB - 1}, "disk_headroom"),
    ],
)
def test_what_cannot_hold_the_generations_of_a_peak_is_refused_by_name(changes, rule):
    with pytest.raises(Refused) as caught:
        demand_room(room(**changes))

    assert caught.value.details["rule"] == rule
    assert {"value", "threshold"} <= caught.value.details.keys()


def test_one_node_of_a_cluster_that_is_too_small_refuses_the_plan():
    nodes = (RedisNode("primary a", 0.7, 2 * GB, "maxmemory"), RedisNode("primary b", 0.3, 2 * GB, "maxmemory"))

    failed = [verdict for verdict in room(nodes=nodes) if not verdict.passed]

    assert [verdict.rule for verdict in failed] == ["redis_headroom"]
    assert "primary a" in failed[0].note


def timings(**stages):
    no_time_spent = TimeSpent()
    embed = TimeSpent(1.0, 1.0)
    return Timings(embed, no_time_spent, no_time_spent, no_time_spent, no_time_spent, stages, 1.0, "", no_time_spent)


@pytest.mark.parametrize(("rate", "seconds"), [(100.0, 1 + 12.0), (1000.0, 1 + 4.0)])
def test_a_gpu_waits_for_the_slowest_of_what_the_processor_does(rate, seconds):
    trial_timings = timings(read=4.0, tower=2.0, topk=90.0, write=3.0)

    assert gpu_seconds(trial_timings, rate, shape()) == seconds  # 1,000 users and 200 items


def test_other_lists_leave_out_the_default_tables_that_the_bundle_cannot_fill():
    bundle: Any = SimpleNamespace(value_models={})

    tables = resize_lists(NightConfig(), bundle, 7).tables

    assert tables["user_topk"].k == 7 and tables["item_similar"].k == 100
    assert "user_affinity" not in tables


@pytest.mark.parametrize("layout", [Layout("topk", 40, "f2"), Layout("vector", 252, "f4")], ids=str)
def test_a_page_of_records_that_divide_it_leaves_redis_its_header(layout):
    """Exactly 256 KiB and a header would take 320 KiB of jemalloc's."""
    page_bytes = NightConfig().page_bytes
    assert page_bytes % layout.size_bytes == 0

    pages = Pages.of(10 * page_bytes // layout.size_bytes, 1, layout, page_bytes)

    assert page_bytes - layout.size_bytes - 64 <= pages.full_page_bytes <= page_bytes - 64
