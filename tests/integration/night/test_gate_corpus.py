"""The corpus: spoilt generations are refused, each by the rule that names its mistake; whole ones never are."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import NotJudged
from cache.l2.sync_clients import connect
from cache.process.redis_server import join_or_start_server
from cache.store.artefacts import read_manifest
from cache.store.releases import all_releases
from precompute.bulk.load import unlink_pages
from precompute.bulk.reload import find_damaged_pages
from precompute.config.settings import ReferenceConfig
from precompute.gates.judge import GATES, LIVE_FILES_RULE, OVERRIDABLE_RULES
from precompute.steps import verify
from tests.conftest import redis_binary
from tests.integration.bad_inputs import BAD_INPUTS
from tests.integration.corpus import Bench, Spoilt, build, cut_at, failed, judged, make_bench, retrain
from tests.integration.faults import FAULTS
from tests.integration.nights import prepare, publish_night

COMPARED = {
    "coverage_of_live", "items_of_live", "tables_of_live", "distinct_lists", "top_items_of_live",
    "score_psi", "value_psi", "list_jaccard", "stale_lists",
}  # fmt: skip
SEED = int(os.environ.get("LARDER_SEED", "20260131"))
CLEAN_QUICK, CLEAN_STORM = 6, 54
Verdicts = dict[str, dict[str, Any]]

QUICK_FAULTS = (
    "ids_shuffled", "off_by_one", "half_the_users", "model_swapped_and_declared", "nan_scores",
    "popularity_collapsed", "stale_copy", "wrong_dimension", "index_quantizer_off",
    "index_of_a_like_night", "vocabulary_shifted", "int8_lists_swapped", "bodies_exchanged",
    "int8_values_broken", "same_values_for_all", "values_doubled",
)  # fmt: skip
QUICK_INPUTS = (
    "bundle_vocabulary_shuffled", "half_the_source", "constant_value_model", "values_on_another_scale",
)  # fmt: skip


@pytest.fixture(scope="module")
def margins() -> Iterator[dict[str, list[tuple[str, Any, Any]]]]:
    """What clean and spoilt generations measured, rule by rule; shown with -s."""
    rows_by_rule: dict[str, list[tuple[str, Any, Any]]] = {}
    yield rows_by_rule
    for rule, rows in sorted(rows_by_rule.items()):
        for kind in ("clean", "spoilt"):
            values = [(value, threshold) for name, value, threshold in rows if name == kind]
            if numbers := [measurement for measurement in values if isinstance(measurement[0], int | float)]:
                print(f"{rule:20} {kind:7} {min(numbers)} to {max(numbers)} (value, threshold)")


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose settings may be changed."""
    with join_or_start_server(tmp_path_factory.mktemp("redis"), server_binary=redis_binary()) as running:
        yield running.url


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, own_url: str) -> Bench:
    """One live night and its successor, built once."""
    print(f"seed {SEED}")
    seed = SEED % 10_000
    return make_bench(tmp_path_factory.mktemp("bench"), own_url, seed=seed, users=600, items=240)


def quick(names: Any, quick_names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick_names else pytest.mark.storm) for name in names]


def note(margins: dict[str, Any], kind: str, verdicts: Verdicts, rules: Any) -> None:
    for rule in rules:
        verdict = verdicts[rule]
        margins.setdefault(rule, []).append((kind, verdict["value"], verdict["threshold"]))


def test_the_generation_that_the_mistakes_are_planted_in_is_whole(bench: Bench) -> None:
    assert failed(bench.judge()) == set()


@pytest.mark.parametrize("name", quick(FAULTS, QUICK_FAULTS))
def test_a_spoilt_generation_is_refused_by_the_rule_that_names_its_mistake(
    bench: Bench, margins: dict[str, Any], name: str
) -> None:
    fault, rule = FAULTS[name]

    verdicts = bench.judge(fault)

    assert rule in failed(verdicts), verdicts
    note(margins, "spoilt", verdicts, [rule])
    with connect(bench.config.redis_url, 5.0) as client:
        control = Control(client, bench.config.keyspace())
        pointer, row = control.read_pointer(), control.rows()[bench.generation]
    assert pointer is not None and pointer.generation == bench.live
    assert row.state is GenerationState.REFUSED and rule in row.reason
    last_release = all_releases(bench.config.store())[-1]
    assert last_release.action == "refuse" and rule in last_release.reason


@pytest.mark.parametrize("name", quick(BAD_INPUTS, QUICK_INPUTS))
def test_a_night_that_follows_a_wrong_bundle_or_source_is_refused(
    bench: Bench, margins: dict[str, Any], tmp_path: Path, name: str
) -> None:
    change, rule = BAD_INPUTS[name]
    config = change(bench.config, tmp_path)

    verdicts = judged(config, build(config, cut_at(bench.config, 0.9)))

    assert rule in failed(verdicts), verdicts
    note(margins, "spoilt", verdicts, [rule])


def first_page(bench: Bench, generation: str, table: str = "user_topk") -> str:
    return bench.config.keyspace().page(generation, table, 0)


def evicted(client: Any, bench: Bench) -> None:
    client.delete(first_page(bench, bench.generation))


def corrupted(client: Any, bench: Bench) -> None:
    client.setrange(first_page(bench, bench.generation, "item_similar"), 99, b"\xff\x00\xff")


def cut_short(client: Any, bench: Bench) -> None:
    name = first_page(bench, bench.generation, "user_vector")
    client.set(name, client.get(name)[:-8])


def page_of_the_live_generation(client: Any, bench: Bench) -> None:
    client.set(first_page(bench, bench.generation), client.get(first_page(bench, bench.live)) or b"")


def all_pages_lost(client: Any, bench: Bench) -> None:
    manifest = read_manifest(bench.config.store(), bench.generation)
    unlink_pages(client, bench.config.keyspace(), manifest)


def evicts_everything(client: Any, bench: Bench) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")


def nearly_full(client: Any, bench: Bench) -> None:
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.97))


@pytest.mark.parametrize(("harm", "rule"), [(evicts_everything, "maxmemory_policy"), (nearly_full, "redis_headroom")])
def test_what_redis_does_to_a_generation_refuses_it(bench: Bench, harm: Any, rule: str) -> None:
    try:
        verdicts = bench.judge(in_redis=lambda client, _manifest: harm(client, bench))
    finally:
        with connect(bench.config.redis_url, 5.0) as client:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "volatile-lru")

    assert rule in failed(verdicts), verdicts


def test_live_pages_that_redis_lost_say_nothing_of_the_generation(bench: Bench) -> None:
    def lose_live_page(client: Any, _manifest: Any) -> None:
        client.rename(first_page(bench, bench.live), "aside")

    try:
        with pytest.raises(NotJudged, match=r"of the live generation.*larder restore"):
            bench.judge(in_redis=lose_live_page)
    finally:
        with connect(bench.config.redis_url, 5.0) as client:
            client.rename("aside", first_page(bench, bench.live))
            row = Control(client, bench.config.keyspace()).rows()[bench.generation]

    assert row.state is not GenerationState.REFUSED


@pytest.mark.parametrize("harm", [evicted, corrupted, cut_short, page_of_the_live_generation, all_pages_lost])
def test_pages_that_redis_lost_or_changed_are_loaded_again_and_refuse_nothing(bench: Bench, harm: Any) -> None:
    verdicts = bench.judge(in_redis=lambda client, _manifest: harm(client, bench))

    assert failed(verdicts) == set()
    assert "loaded once more" in verdicts["pages_in_redis"]["note"]
    with connect(bench.config.redis_url, 5.0) as client:
        control = Control(client, bench.config.keyspace())
        assert not find_damaged_pages(control, bench.config.store(), bench.generation)
        assert control.rows()[bench.generation].state is GenerationState.VERIFIED


def test_a_file_that_differs_from_the_manifest_refuses_before_anything_is_opened(bench: Bench) -> None:
    def spoil(spoilt: Spoilt) -> None:
        with (spoilt.root / "items/vectors.f32").open("r+b") as file:
            file.truncate(64)

    verdicts = bench.judge(spoil, reseal=False)

    assert failed(verdicts) == {"files"} and set(verdicts) == {"files"}


def test_files_that_fit_their_checksums_but_cannot_be_opened_refuse(bench: Bench) -> None:
    def spoil(spoilt: Spoilt) -> None:
        (spoilt.root / "items/vectors.f32").write_bytes(b"12345678")

    assert failed(bench.judge(spoil)) == {"opens"}


def test_a_live_generation_whose_manifest_is_gone_is_no_first_generation(bench: Bench) -> None:
    def spoil(spoilt: Spoilt) -> None:
        (spoilt.live_root / "manifest.json").rename(spoilt.live_root / "manifest.aside")

    try:
        verdicts = bench.judge(spoil)
    finally:
        root = bench.config.store().local(f"generations/{bench.live}")
        (root / "manifest.aside").rename(root / "manifest.json")

    # An override accepts only the rule that it names.
    assert failed(verdicts) == {"live_files", *COMPARED}
    for rule in COMPARED:
        assert "cannot be read" in verdicts[rule]["note"] and rule in OVERRIDABLE_RULES


def clean_seeds() -> list[Any]:
    quick_ones = [pytest.param(SEED + number) for number in range(CLEAN_QUICK)]
    return quick_ones + [
        pytest.param(SEED + number, marks=pytest.mark.storm) for number in range(CLEAN_QUICK, CLEAN_STORM + CLEAN_QUICK)
    ]


@pytest.mark.parametrize("seed", clean_seeds())
def test_the_next_night_of_a_live_generation_is_never_refused(
    tmp_path: Path, own_url: str, margins: dict[str, Any], seed: int
) -> None:
    """1-10 % new data, another seed of the trainer, or both."""
    rng = np.random.default_rng(seed)
    new, kind = float(rng.uniform(0.01, 0.10)), seed % 3
    config = replace(
        prepare(
            tmp_path, own_url, seed=seed % 100_000,
            users=int(rng.integers(200, 900)), items=int(rng.integers(60, 400)),
        ),
        reference=ReferenceConfig(dims=int(rng.choice([8, 16, 32])), choose=False),
        shards=int(rng.integers(1, 5)),
    )  # fmt: skip
    earlier_cut, after = cut_at(config, 0.95 - new), cut_at(config, 0.95)
    retrain(config, seed=0, data_until=earlier_cut)
    publish_night(config, earlier_cut)
    data_until = earlier_cut if kind == 1 else after
    if kind:
        retrain(config, seed=seed % 1000 + 1, data_until=data_until)

    verdicts = judged(config, build(config, data_until))

    assert failed(verdicts) == set(), (new, kind, verdicts)
    note(margins, "clean", verdicts, verdicts)


def test_a_refusal_says_how_it_is_overridden_or_that_it_cannot_be(bench: Bench) -> None:
    fault, _ = FAULTS["popularity_collapsed"]
    bench.judge(fault)

    with connect(bench.config.redis_url, 5.0) as client:
        reason = Control(client, bench.config.keyspace()).rows()[bench.generation].reason

    command = f'larder override {bench.generation} --rule distinct_lists --reason "..."'
    assert command in reason and f"`larder verify {bench.generation}`" in reason
    assert f"compared with {bench.live}" in reason
    assert "exact_lists" in reason and "cannot be overridden" in reason


def test_the_whole_generation_passes_once_the_mistake_is_gone(bench: Bench) -> None:
    bench.judge(FAULTS["off_by_one"][0])
    assert failed(bench.judge()) == set()
    assert verify.run(bench.config, {"generation": bench.generation})["verified"]


def test_every_gate_states_its_rule_under_its_own_name(bench: Bench) -> None:
    verdicts = bench.judge()
    assert list(verdicts) == ["files", LIVE_FILES_RULE, *(gate.rule for gate in GATES)]
    compared = {rule for rule, verdict in verdicts.items() if verdict.get("baseline") == bench.live}
    assert {"coverage_of_live", "list_jaccard", "score_psi", "top_items_of_live"} <= compared
