"""A night's steps on real parts: remote stores, resuming, gates that refuse, clear errors."""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import BundleError, ConfigError, Conflict, CorruptArtefact, NotJudged, Refused, StoreError
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest, Producer
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, read_manifest, sha256_of
from cache.store.releases import all_releases
from precompute.builds.build import Build, record_copies
from precompute.builds.reports import ASSEMBLE_REPORT, BEGIN_REPORT, BuildId
from precompute.bulk.headroom import REDIS_USED_SHARE_MAX
from precompute.bundles import bundle_store
from precompute.bundles.bundle import Bundle
from precompute.config.settings import GateThresholds, Sources, TableConfig
from precompute.gates.evidence.candidate import Candidate, Measurement, integrity
from precompute.gates.judge import run_gates
from precompute.gates.rules import skew as skew_gate
from precompute.gates.rules.models import int8_agreement
from precompute.partitions.holdout import read_holdout
from precompute.partitions.partition import PartitionJob
from precompute.reference.train import train_reference
from precompute.releases.recovery import restore
from precompute.releases.release_log import Releases
from precompute.sources import files
from precompute.steps import assemble, begin, embed_items, load, publish, quantize, retire, score, verify
from precompute.steps import index as index_step
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, prepare, publish_night, roll_back
from tests.integration.shell import shell
from tests.opened import open_generation


@pytest.fixture
def config(tmp_path, redis_url):
    return prepare(tmp_path, redis_url, users=150, items=60)


def live(config):
    with connect(config.redis_url, 5.0) as client:
        pointer = Control(client, config.keyspace()).read_pointer()
    return None if pointer is None else pointer.generation


def keys_of(config, generation):
    with connect(config.redis_url, 5.0) as client:
        return client.keys(f"larder:1:{config.namespace}:g:{generation}:*")


def state(config, generation):
    with connect(config.redis_url, 5.0) as client:
        return Releases(config.store(), Control(client, config.keyspace())).state(generation)


def test_a_night_works_on_a_remote_store_and_another_host_opens_it(config, tmp_path):
    config = replace(config, artifacts=f"memory://night-{uuid.uuid4().hex}")
    generation = publish_night(config, DATA_UNTIL)

    # The host that built it is gone; only the store is left.
    shutil.rmtree(tmp_path / "state")
    other_host = ArtefactStore(config.store().url, tmp_path / "another-host")
    manifest, root = open_generation(other_host, generation)

    assert manifest.generation == generation == live(config)
    assert root.is_relative_to(tmp_path / "another-host")
    with connect(config.redis_url, 5.0) as client:
        client.delete(config.keyspace().live)
    assert restore(config)["generation"] == generation


def test_every_step_can_be_repeated_and_finds_its_own_work(config):
    generation = build_verified(config, DATA_UNTIL)
    manifest_before = read_manifest(config.store(), generation)

    assert build_verified(config, DATA_UNTIL) == generation

    after = read_manifest(config.store(), generation)
    assert (after.tables, after.entity_sets, after.items) == (
        manifest_before.tables,
        manifest_before.entity_sets,
        manifest_before.items,
    )
    assert load.run(config, {"generation": generation})["loaded_bytes"] == 0


def test_a_changed_input_is_another_generation(config):
    first = build_verified(config, DATA_UNTIL)
    assert build_verified(replace(config, shards=3), DATA_UNTIL) != first
    assert build_verified(replace(config, gates=replace(config.gates, skew_overlap=0.1)), DATA_UNTIL) == first
    assert build_verified(config, NEXT) != first  # last: it replaces those that nobody published


def test_a_generation_that_is_live_is_not_built_again(config):
    publish_night(config, DATA_UNTIL)
    assert begin.run(config, data_until=DATA_UNTIL, run_after=None)["already_live"]


def test_a_gate_that_fails_refuses_and_the_live_generation_stays(config):
    first = publish_night(config, DATA_UNTIL)
    strict = replace(config, gates=replace(config.gates, coverage_of_source=1.01))

    with pytest.raises(Refused, match=r"coverage_of_source is .* the threshold 1\.01") as caught:
        build_verified(strict, NEXT)

    assert caught.value.details["rule"] == "coverage_of_source"
    assert live(config) == first
    refused = next(release for release in all_releases(config.store()) if release.action == "refuse")
    assert "coverage_of_source" in refused.reason
    assert state(config, refused.generation) is GenerationState.REFUSED
    gates = read_manifest(config.store(), refused.generation).gates
    assert [gate["rule"] for gate in gates if not gate["passed"]] == ["coverage_of_source"]
    with pytest.raises(Conflict, match="refused"):
        publish.run(config, {"generation": refused.generation}, attempt="x")
    assert publish_night(config, NEXT) == refused.generation == live(config)


def test_a_page_that_changed_in_redis_is_loaded_again_before_publishing(config):
    first = publish_night(config, DATA_UNTIL)
    build = begin.run(config, data_until=NEXT, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        score.run_shard(config, build, shard)
    assemble.run(config, build)
    index_step.run(config, build)
    quantize.run(config, build)
    load.run(config, build)
    name = config.keyspace().page(build["generation"], "user_topk", 0)
    with connect(config.redis_url, 5.0) as client:
        page = client.get(name)
        client.setrange(name, 40, b"\x00\x01")

        verify.run(config, build)

        assert client.get(name) == page
    assert live(config) == first


def test_a_file_that_changed_on_disk_is_noticed_before_publishing(config):
    build: BuildId = {"generation": build_verified(config, DATA_UNTIL)}
    root = config.store().local(f"generations/{build['generation']}")
    with (root / "items/vectors.f32").open("r+b") as file:
        file.write(b"\x01")
    with pytest.raises(Refused, match="SHA-256"):
        verify.run(config, build)
    assert live(config) is None


def test_a_gate_that_raises_hangs_or_lacks_its_input_lets_nothing_pass(config, tmp_path):
    """Fail closed."""
    generation = build_verified(config, DATA_UNTIL)
    manifest, root = open_generation(config.store(), generation)
    release = threading.Event()

    @integrity("raises")
    def raises(_candidate: Candidate) -> Measurement:
        raise ZeroDivisionError

    @integrity("hangs")
    def hangs(_candidate: Candidate) -> Measurement:
        release.wait(30)
        return Measurement(True, 1, 1)

    @integrity("lacks")
    def lacks(candidate: Candidate) -> Measurement:
        return Measurement(candidate.manifest.facts["nothing"] > 0, 1, 1)

    with connect(config.redis_url, 5.0) as client:
        candidate = Candidate(
            manifest,
            root,
            ItemTable.open(root, manifest),
            Control(client, config.keyspace()),
            None,
            replace(config.gates, timeout_s=0.05),
            10,
        )
        for gate in (raises, lacks, hangs):
            with pytest.raises(NotJudged, match=gate.rule):
                list(run_gates(candidate, [gate]))
    release.set()


def test_loading_costs_one_command_per_page_not_per_entity(config, own_redis):
    """Bulk only."""
    config = replace(config, redis_url=own_redis.url)
    generation = build_verified(config, DATA_UNTIL)
    manifest = read_manifest(config.store(), generation)
    pages = sum(table.page_count for table in manifest.tables.values())
    with connect(own_redis.url, 5.0) as client:
        client.flushall()
        client.config_resetstat()
        load.run(config, {"generation": generation})
        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
        keys = client.dbsize()
    assert calls["cmdstat_set"] == pages < manifest.entity_sets["user"].count
    assert keys <= pages + 3


def test_loading_is_refused_before_redis_runs_full(config, own_redis):
    config = replace(config, redis_url=own_redis.url)
    with connect(own_redis.url, 5.0) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
    with pytest.raises(Refused) as caught:
        build_verified(config, DATA_UNTIL)
    assert caught.value.details["rule"] == "redis_headroom"
    with connect(own_redis.url, 5.0) as client:
        assert not list(client.scan_iter(f"larder:1:{config.namespace}:g:*"))


def test_no_key_belongs_to_a_generation_that_the_registry_does_not_know(config):
    publish_night(config, DATA_UNTIL)
    publish_night(config, NEXT)
    with connect(config.redis_url, 5.0) as client:
        registered_generations = set(Control(client, config.keyspace()).rows())
        generations_in_redis = {
            key.decode().split(":")[4] for key in client.scan_iter(f"larder:1:{config.namespace}:g:*")
        }
    assert generations_in_redis and generations_in_redis <= registered_generations


def test_the_manifest_names_index_recall_model_and_vocabulary_of_one_build(config):
    """One manifest over tables, index and model; recall measured and stored."""
    manifest = read_manifest(config.store(), build_verified(config, DATA_UNTIL))
    assert set(manifest.indexes) == {"inner_product", "cosine"}
    assert all(index.recall is not None and index.recall > 0.99 for index in manifest.indexes.values())
    agreement = manifest.models["user_tower"].agreement
    assert agreement["batch_invariant"] and agreement["overlap_at_20"] > 0.9
    assert manifest.tables["user_affinity"].labels
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_records_of_a_shard_do_not_depend_on_how_many_threads_made_them(config):
    manifest_of_one_thread = read_manifest(config.store(), build_verified(replace(config, threads=1), DATA_UNTIL))
    moved = replace(config, threads=2, artifacts="elsewhere", namespace=f"{config.namespace}-2")
    two = read_manifest(moved.store(), build_verified(moved, DATA_UNTIL))
    for name, table in manifest_of_one_thread.tables.items():
        if table.kind == "topk":
            checksums = [part.file.sha256 for part in table.parts]
            assert checksums == [part.file.sha256 for part in two.tables[name].parts]


def test_a_night_without_a_cut_or_sources_says_what_to_set(config):
    with pytest.raises(ConfigError, match="data_until"):
        begin.run(config, data_until=None, run_after=None)
    empty = replace(config, sources=replace(config.sources, interactions=()))
    with pytest.raises(ConfigError, match=r"sources\.interactions is empty"):
        begin.run(empty, data_until=DATA_UNTIL, run_after=None)


def test_a_cut_that_has_not_come_yet_is_refused_before_anything_is_read(config):
    """Once live, it would keep every scheduled night from being published until then."""
    later = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(ConfigError, match=f"{later.year}.*ahead of Redis' clock"):
        begin.run(config, data_until=later.isoformat(), run_after=None)
    assert not config.store().names("generations")
    with pytest.raises(ConfigError, match="ahead of Redis' clock"):
        begin.run(replace(config, data_until=later.isoformat()), data_until=None, run_after=DATA_UNTIL)


def test_a_cut_older_than_the_live_generation_is_refused_before_anything_is_read(config):
    first = publish_night(config, NEXT)

    with pytest.raises(ConfigError, match=f"older than the live generation {first}.*roll-back"):
        begin.run(config, data_until=DATA_UNTIL, run_after=None)

    assert config.store().names("generations") == [first]
    assert begin.run(config, data_until=NEXT, run_after=None)["already_live"]


def test_a_scheduled_night_leaves_out_what_came_after_it_was_due(config):
    """A run that waited for a pool, or was cleared, is as old as it says, and has choices to be judged by."""
    cut_build = Build.of(config, begin.run(config, data_until=DATA_UNTIL, run_after=None))
    due = replace(config, namespace=f"{config.namespace}-due")
    scheduled = Build.of(due, begin.run(due, data_until=None, run_after=DATA_UNTIL))
    named = replace(config, namespace=f"{config.namespace}-named")
    uncut_build = Build.of(named, begin.run(named, data_until=None, run_after=None, named=DATA_UNTIL))

    assert scheduled.need_report(BEGIN_REPORT)["interactions"] == cut_build.need_report(BEGIN_REPORT)["interactions"]
    assert scheduled.need_report(BEGIN_REPORT)["interactions"] < uncut_build.need_report(BEGIN_REPORT)["interactions"]
    assert read_holdout(scheduled.root) == read_holdout(cut_build.root) != {}
    assert not read_holdout(uncut_build.root)


def test_steps_that_need_room_sweep_what_earlier_nights_left(config):
    """One night that is refused, or breaks, must not take the room of all nights after it."""
    publish_night(config, DATA_UNTIL)
    strict = replace(config, gates=replace(config.gates, coverage_of_source=1.01))
    with pytest.raises(Refused, match="coverage_of_source"):
        build_verified(strict, NEXT)
    refused = max(config.store().names("generations"))
    assert keys_of(config, refused)

    begin.run(config, data_until="2026-01-31T00:00:00Z", run_after=None)

    assert state(config, refused) is GenerationState.RETIRED and not keys_of(config, refused)
    build: BuildId = {"generation": build_verified(config, "2026-01-31T00:00:00Z")}
    broken = "20260130T120000Z-aaaaaaaaaaaa"
    with connect(config.redis_url, 5.0) as client:
        Control(client, config.keyspace()).set_row(broken, RegistryRow(GenerationState.LOADED, client.time()[0]))
    load.run(config, build)
    assert state(config, broken) is GenerationState.RETIRED


def test_a_night_that_a_newer_one_retired_says_so(config):
    older = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    embed_items.run(config, older)
    newer_build = begin.run(config, data_until=NEXT, run_after=None)

    with pytest.raises(Refused) as refusal:
        score.run(config, older, older["shards"])

    message = str(refusal.value)
    assert older["generation"] in message
    assert f"was retired during this step by {newer_build['generation']}" in message


def test_retire_sweeps_old_nights_and_keeps_what_a_rollback_needs(config):
    config = replace(config, keep=1, superseded_grace_s=0.0)
    first = publish_night(config, DATA_UNTIL)
    second = publish_night(config, NEXT)
    third = publish_night(config, "2026-01-31T00:00:00Z")
    assert config.store().names("generations") == sorted([second, third])
    assert state(config, first) is GenerationState.RETIRED
    assert roll_back(config) == second


ABSENT_GENERATION = "20250101T000000Z-aaaaaaaaaaaa"


def leave_copy(store):
    """A copy of a generation that the store does not have, on this store's host."""
    record_copies(store, ABSENT_GENERATION)
    path = store.local(f"generations/{ABSENT_GENERATION}/items/ids.bin")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"ids")
    assert store.host_copy_generations() == [ABSENT_GENERATION] and store.names(f"copies/{ABSENT_GENERATION}")


def test_every_step_runs_on_a_host_that_shares_only_store_sources_and_redis_and_sweeps_its_copies(
    config, tmp_path, monkeypatch
):
    # Given separate folders for every step, and sources that all steps read from one address
    for module in ("builds.build", "steps.retire"):
        monkeypatch.setattr(f"precompute.{module}.COPY_IDLE_S", -60.0)
    at = f"memory://hosts-{uuid.uuid4().hex}"
    for name in ("interactions.parquet", "items.parquet"):
        MemoryFileSystem().pipe_file(f"{at}/{name}", config.path(name).read_bytes())
    sources = Sources((f"{at}/inter*.parquet",), item_features=f"{at}/items.parquet")
    config = replace(config, artifacts=f"{at}/artifacts", sources=sources)
    hosts = (replace(config, base=str(tmp_path / f"{number}")) for number in itertools.count())

    def apart(step, *arguments, **named):
        host = next(hosts)
        leave_copy(host.store())
        step_result = step(host, *arguments, **named)
        assert ABSENT_GENERATION not in host.store().host_copy_generations(), step.__module__
        assert not host.store().names(f"copies/{ABSENT_GENERATION}"), step.__module__
        return step_result

    trained = train_reference(next(hosts), data_until=DATA_UNTIL)
    publish_night(next(hosts), DATA_UNTIL)
    build = apart(begin.run, data_until=NEXT, run_after=None)
    apart(embed_items.run, build)
    for shard in build["shards"]:
        apart(score.run_shard, build, shard)
    apart(assemble.run, build)
    apart(index_step.run, build)
    apart(quantize.run, build)
    apart(load.run, build)
    verified = apart(verify.run, build)
    apart(publish.run, verified, attempt="test")
    apart(retire.run)

    assert live(config) == build["generation"]
    manifest, root = open_generation(next(hosts).store(), build["generation"])
    assert len(ItemTable.open(root, manifest).vectors) == manifest.items.count
    assert manifest.bundle_digest == trained["digest"]
    assert not list(tmp_path.rglob("host-cache/*/bundles/*"))


def test_gates_have_the_time_that_reading_all_bytes_takes_at_the_governors_floor(config):
    """However many the bytes are: with a fixed time large generations were refused for their size."""
    build: BuildId = {"generation": build_verified(config, DATA_UNTIL)}
    gates = replace(config.gates, timeout_s=1e-6, total_timeout_s=1e-6)
    fast = replace(config.governor, floor_mib_s=1e9, ceiling_mib_s=0)
    with pytest.raises(NotJudged):
        verify.run(replace(config, gates=gates, governor=fast), build)

    slow = replace(config.governor, floor_mib_s=1e-3)
    assert verify.run(replace(config, gates=gates, governor=slow), build)["verified"]


def pages_of(client, config, generation, table):
    pattern = config.keyspace().page(generation, table, 0)[:-1] + "*"
    return sorted(client.scan_iter(pattern), key=lambda key: int(key.rsplit(b":", 1)[1]))


def test_publish_reads_records_back_before_the_pointer_moves(config, monkeypatch):
    """Success is what a reader can read back, even after pages of a wrong length were loaded again."""
    first = publish_night(config, DATA_UNTIL)
    build: BuildId = {"generation": build_verified(config, NEXT)}

    def cut_off(*_arguments, **_options):
        with connect(config.redis_url, 5.0) as client:
            for page in pages_of(client, config, build["generation"], "user_topk"):
                client.set(page, b"cut off")

    monkeypatch.setattr("precompute.releases.moves.load_missing", cut_off)
    with pytest.raises(CorruptArtefact, match="read back"):
        publish.run(config, build, attempt="test")
    assert live(config) == first


def test_pages_lost_since_they_were_verified_are_streamed_again_before_the_pointer_moves(config):
    publish_night(config, DATA_UNTIL)
    build: BuildId = {"generation": build_verified(config, NEXT)}
    with connect(config.redis_url, 5.0) as client:
        lost_keys = pages_of(client, config, build["generation"], "user_topk")
        client.delete(*lost_keys)
        publish.run(config, build, attempt="test")
        assert pages_of(client, config, build["generation"], "user_topk") == lost_keys
    assert live(config) == build["generation"]


def retrain(config, dims):
    reference = replace(config.reference, dims=dims)
    return train_reference(replace(config, reference=reference), data_until=DATA_UNTIL)


def test_a_bundle_replaced_while_the_night_begins_leaves_the_night_whole(config, monkeypatch):
    copy = shutil.copytree
    old = Bundle.open(config.path(config.bundle)).digest

    def replaced_after(source, target):
        copy(source, target)
        retrain(config, 8)

    monkeypatch.setattr(shutil, "copytree", replaced_after)
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    monkeypatch.setattr(shutil, "copytree", copy)

    root = config.store().local(f"generations/{build['generation']}")
    pinned = Bundle.open(root / "bundle")
    assert pinned.digest == old != Bundle.open(config.path(config.bundle)).digest
    for model in pinned.models:
        assert sha256_of(root / f"models/{model.name}.fp32.onnx") == model.sha256
    assert not list(config.store().local("").glob(".bundle*"))
    embed_items.run(config, build)


def test_a_bundle_torn_while_it_is_copied_is_copied_again(config, monkeypatch):
    copy, copies = shutil.copytree, []

    def torn_once(source, target):
        copy(source, target)
        copies.append(target)
        if len(copies) == 1:
            (target / "user_tower.onnx").write_bytes(b"half")

    monkeypatch.setattr(shutil, "copytree", torn_once)
    begin.run(config, data_until=DATA_UNTIL, run_after=None)
    assert len(copies) == 2


def test_a_model_that_does_not_open_ends_the_night_while_it_still_reads(config, monkeypatch):
    path = config.path(config.bundle) / "user_tower.onnx"
    path.write_bytes(b"no model")
    data = orjson.loads((path.parent / "bundle.json").read_bytes())
    data["user_tower"]["sha256"] = sha256_of(path)
    (path.parent / "bundle.json").write_bytes(orjson.dumps(data))

    def run_endlessly(job: PartitionJob, _earlier: object) -> None:
        for rows in itertools.count():
            job.report_row_count(rows)

    monkeypatch.setattr(PartitionJob, "run", run_endlessly)
    with pytest.raises(BundleError, match=r"user_tower\.onnx is not a model"):
        begin.run(config, data_until=DATA_UNTIL, run_after=None)


@pytest.mark.parametrize("file", ["models/user_tower.fp32.onnx", "bundle/bundle.json"])
def test_a_model_that_changed_since_the_night_began_is_refused(config, file):
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    path = config.store().local(f"generations/{build['generation']}/{file}")
    path.write_bytes(path.read_bytes() + b" ")

    with pytest.raises(BundleError, match=r"SHA-256|begin. pinned"):
        score.run_shard(config, build, 0)


def test_training_that_fails_at_the_swap_leaves_the_old_bundle(config, monkeypatch):
    target, rename = config.path(config.bundle), Path.replace
    old = Bundle.open(target).digest

    def fails(self, to):
        if Path(to) == target and self.name.endswith(".part"):
            raise OSError("no space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        retrain(config, 8)
    assert Bundle.open(target).digest == old
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".bundle")]


def test_a_source_rewritten_while_the_night_reads_it_is_refused(config, monkeypatch):
    pin = files.digest_files

    def rewritten_after(files):
        digest_and_files = pin(files)
        table = pq.read_table(config.path("interactions.parquet"))
        pq.write_table(table.slice(0, len(table) // 2), config.path("interactions.parquet"))
        return digest_and_files

    with monkeypatch.context() as patched:
        patched.setattr(begin, "digest_files", rewritten_after)
        with pytest.raises(StoreError, match="changed while"):
            begin.run(config, data_until=DATA_UNTIL, run_after=None)

    assert begin.run(config, data_until=DATA_UNTIL, run_after=None)


@pytest.mark.parametrize("data_until", [DATA_UNTIL, None], ids=["cut", "no cut"])
def test_files_that_arrive_while_the_night_reads_are_for_the_next_one(config, monkeypatch, data_until):
    """A log collector writes a file a minute: a night that began over again for each would never end."""
    pin = files.digest_files
    (config.path(".") / "clicks").mkdir()
    shutil.move(config.path("interactions.parquet"), config.path("clicks/1.parquet"))
    config = replace(config, sources=replace(config.sources, interactions=("clicks",)))

    def arriving_after(files):
        digest_and_files = pin(files)
        table = pq.read_table(config.path("clicks/1.parquet"))
        number = len(list(config.path("clicks").iterdir())) + 1
        pq.write_table(table.slice(0, 10), config.path(f"clicks/{number}.parquet"))
        return digest_and_files

    with monkeypatch.context() as patched:
        patched.setattr(begin, "digest_files", arriving_after)
        build = begin.run(config, data_until=data_until, run_after=None, named=DATA_UNTIL)
    begin_report = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)

    names = [input_file["name"] for input_file in begin_report["inputs"]]
    assert "1.parquet" in names and "2.parquet" not in names
    assert begin_report["unusable"]["interactions"]["rows"] == len(pq.read_table(config.path("clicks/1.parquet")))


@pytest.mark.parametrize("content", [b"PAR1 half of what is being written", None])
def test_a_source_that_is_being_replaced_while_it_is_read_is_read_again(config, monkeypatch, content):
    pin, path = files.digest_files, config.path("interactions.parquet")
    original_content = path.read_bytes()

    def torn_after(files):
        digest_and_files = pin(files)
        path.unlink() if content is None else path.write_bytes(content)
        return digest_and_files

    with monkeypatch.context() as patched:
        patched.setattr(begin, "digest_files", torn_after)
        with pytest.raises(StoreError, match="changed while"):
            begin.run(config, data_until=DATA_UNTIL, run_after=None)

    path.write_bytes(original_content)
    assert begin.run(config, data_until=DATA_UNTIL, run_after=None)


def test_a_bundle_that_is_replaced_all_the_time_is_worth_another_try(config, monkeypatch):
    copy = shutil.copytree
    pauses: list[float] = []

    def torn(source, target):
        copy(source, target)
        (target / "user_tower.onnx").write_bytes(b"half")
        (source / "user_tower.onnx").touch()

    monkeypatch.setattr(shutil, "copytree", torn)
    monkeypatch.setattr("precompute.bundles.bundle_store.time.sleep", pauses.append)
    with pytest.raises(StoreError, match="cannot copy the bundle"):
        begin.run(config, data_until=DATA_UNTIL, run_after=None)
    assert pauses == [bundle_store.COPY_PAUSE_S] * (bundle_store.COPY_TRIES_MAX - 1)


def test_a_bundle_that_is_torn_and_stays_so_is_refused(config, monkeypatch):
    (config.path(config.bundle) / "user_tower.onnx").write_bytes(b"half")
    monkeypatch.setattr("precompute.bundles.bundle_store.time.sleep", lambda _seconds: None)

    with pytest.raises(BundleError, match="SHA-256"):
        begin.run(config, data_until=DATA_UNTIL, run_after=None)


def test_a_damaged_copy_on_this_host_is_downloaded_once_more(config, tmp_path):
    config = replace(config, artifacts=f"memory://damaged-{uuid.uuid4().hex}")
    generation = publish_night(config, DATA_UNTIL)
    host = ArtefactStore(config.store().url, tmp_path / "another-host")
    manifest, root = open_generation(host, generation)
    (root / manifest.items.vectors.path).write_bytes(b"")

    open_generation(host, generation)

    assert sha256_of(root / manifest.items.vectors.path) == manifest.items.vectors.sha256
    host.write(f"generations/{generation}/{manifest.items.vectors.path}", b"damaged in the store")
    (root / manifest.items.vectors.path).unlink()
    with pytest.raises(CorruptArtefact):
        open_generation(host, generation)


def test_a_store_that_does_not_answer_is_not_an_unfinished_step(config, monkeypatch):
    config = replace(config, artifacts=f"memory://silent-{uuid.uuid4().hex}")
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)

    def silent(*_arguments, **_options):
        raise OSError("503 slow down")

    other_host_build = Build.of(replace(config, state="another-host"), build)
    assert (
        other_host_build.read_report(BEGIN_REPORT) is not None and other_host_build.read_report(ASSEMBLE_REPORT) is None
    )
    for name in ("cat_file", "get_file"):
        monkeypatch.setattr(MemoryFileSystem, name, silent)
    with pytest.raises(StoreError, match="slow down"):
        other_host_build.read_report(BEGIN_REPORT)


def test_pages_lost_after_they_were_marked_loaded_are_loaded_again(config):
    build: BuildId = {"generation": build_verified(config, DATA_UNTIL)}
    keys = config.keyspace()
    with connect(config.redis_url, 5.0) as client:
        client.delete(keys.page(build["generation"], "user_topk", 0))
        client.setrange(keys.page(build["generation"], "item_vector", 0), 40, b"\x00\x01")

    assert verify.run(config, build)["verified"]

    assert verify.run(config, build)["verified"]
    gates = read_manifest(config.store(), build["generation"]).gates
    pages = next(gate for gate in gates if gate["rule"] == "pages_in_redis")
    assert "loaded once more" not in pages["note"]  # the first had mended them


def test_overlays_make_way_for_pages(config, own_redis):
    """Memory full of records that may be evicted is no reason to keep yesterday's answers."""
    config = replace(config, redis_url=own_redis.url)
    with connect(own_redis.url, 5.0) as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        limit = client.info("memory")["used_memory"] + 6_000_000
        client.config_set("maxmemory", limit)
        for first in range(0, 9_000, 500):
            pipe = client.pipeline(transaction=False)
            for number in range(first, first + 500):
                name = f"larder:1:{config.namespace}:w:old:user_topk:{number}"
                pipe.set(name, b"x" * 700, ex=3600)
            pipe.execute()
        assert client.info("memory")["used_memory"] > REDIS_USED_SHARE_MAX * limit
    assert publish_night(config, DATA_UNTIL) == live(config)


def test_a_gate_that_hangs_does_not_hold_up_the_end_of_the_program(config):
    """Seen from the shell: giving up is also the end."""
    program = (
        "import time\n"
        "from cache.errors import NotJudged\n"
        "from precompute.gates.judge import run_within\n"
        "try:\n"
        "    run_within('hangs', lambda: time.sleep(60), 0.05)\n"
        "except NotJudged as error:\n"
        "    print(error.code)\n"
    )
    completed_process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert completed_process.stdout.strip() == "not_judged"


def candidate_of(config, control, **changes):
    manifest, root = open_generation(config.store(), build_verified(config, DATA_UNTIL))
    return Candidate(
        replace(manifest, **changes), root, ItemTable.open(root, manifest), control, None,
        config.gates, config.history_limit,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tower", "value", "passed", "message"),
    [
        ({"overlap_at_20": 0.99}, {"overlap_at_1": 0.5}, False, "user_affinity"),
        ({"overlap_at_20": 0.5}, {"overlap_at_1": 0.99}, False, "user_tower"),
        ({"overlap_at_20": 0.99}, {"overlap_at_1": 0.95}, True, "user_affinity"),
        ({"precision": "fp32", "why": "x"}, {"overlap_at_1": 0.5}, False, "user_affinity"),
        ({"precision": "fp32", "why": "x"}, {"precision": "fp32"}, True, "no model"),
        ({"precision": "int8"}, {"overlap_at_1": 0.99}, False, "user_tower"),
    ],
)
def test_every_quantized_model_that_users_see_is_held_against_fp32(tower, value, passed, message):
    def table(kind, name):
        return SimpleNamespace(producer=Producer(kind, name))

    facts = {"user_tower": tower, "user_affinity": value}
    models = {name: SimpleNamespace(agreement=agreement) for name, agreement in facts.items()}
    tables = {"a": table("topk", "user_tower"), "b": table("value", "user_affinity")}
    manifest = SimpleNamespace(models=models, tables=tables)
    verdict = int8_agreement(cast(Candidate, SimpleNamespace(manifest=manifest, thresholds=GateThresholds())))
    assert verdict.passed is passed and message in verdict.note


def test_the_skew_gate_compares_every_table_of_lists_for_users(config, monkeypatch):
    tables = {**config.tables, "user_short": TableConfig("user_topk", k=5)}
    config = replace(config, tables=tables)
    with connect(config.redis_url, 5.0) as client:
        candidate = candidate_of(config, Control(client, config.keyspace()))
        assert skew_gate.skew(candidate).passed
        overlap = skew_gate._overlap
        monkeypatch.setattr(
            skew_gate, "_overlap", lambda table, pairs: table.name == "user_topk" and overlap(table, pairs)
        )
        assert not skew_gate.skew(candidate).passed


def location_options(config, tmp_path):
    """Options that name the night's namespace and store, and a state of the command's own."""
    value_by_option = {
        "--namespace": config.namespace,
        "--artifacts": config.path(config.artifacts),
        "--state": tmp_path / "own-state",
    }
    return [str(argument) for pair in value_by_option.items() for argument in pair]


def environment(tmp_path):
    """Without any configured Redis."""
    environ = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS")}
    return {**environ, "HOME": str(tmp_path)}


def run(config, tmp_path, *arguments):
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "precompute", *location_options(config, tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(tmp_path), check=False)


def test_the_shell_says_what_is_wrong_without_a_traceback(config, tmp_path):
    for arguments, message in (
        (["night"], "sources.interactions is empty"),
        *(([command, "20260101T000000Z-000000000000"], "is unknown") for command in ("publish", "load", "verify")),
        (["publish", "../../etc"], "not a generation id"),
        (["roll-back", "--reason", "x"], "no earlier generation"),
        (["restore"], "none runs here, so there is none to rebuild"),
        (["block", "--item", "x" * 300], "256 bytes"),
        (["--config", str(tmp_path / "none.toml"), "status"], "does not exist"),
        (["train"], "sources.interactions is empty"),
    ):
        completed_process = shell(*location_options(config, tmp_path), *arguments, environ=environment(tmp_path))
        assert completed_process.returncode == 1, (arguments, completed_process)
        assert message in completed_process.stderr.replace("\n", " "), (arguments, completed_process.stderr)
        assert "Traceback" not in completed_process.stderr


def test_a_shell_without_redis_restores_what_was_published_and_leaves_no_process(config, tmp_path):
    generation = publish_night(config, DATA_UNTIL)
    completed_process = run(config, tmp_path, "warm", generation)  # which needs a pointer
    assert completed_process.returncode == 0, completed_process.stderr
    assert generation in completed_process.stdout
    assert not (tmp_path / "own-state" / "redis.json").exists()


def test_a_score_that_vanishes_refuses_the_night_with_its_remedy():
    from cache.errors import UnfitValue
    from cache.records import Layout, encode_topk

    with pytest.raises(UnfitValue, match="store it as f4"):
        encode_topk(
            Layout("topk", 2, "f2"),
            np.array([1], np.uint64),
            np.array([[0, 1]], np.uint32),
            np.array([[1.0, 1e-30]], np.float32),
            0,
        )
