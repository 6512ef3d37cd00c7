"""A night's steps on real parts: remote stores, resuming, gates that refuse, clear errors."""

import os
import shutil
import subprocess
import sys
import threading
import uuid
from dataclasses import replace

import numpy as np
import pytest

from cache.artefacts import ArtefactStore, open_generation, read_manifest
from cache.errors import ConfigError, Conflict, Refused
from cache.items import ItemTable
from cache.manifest import Manifest
from cache.releases import all_releases
from precompute import pipeline
from precompute.control import Control, connect
from precompute.gates import Candidate, Verdict, run_gates
from precompute.release import Releases
from precompute.states import State
from tests.integration.nights import NEXT, UNTIL, build_verified, prepare, publish_night, roll_back


@pytest.fixture
def config(tmp_path, redis_url):
    return prepare(tmp_path, redis_url, users=150, items=60)


def live(config):
    with connect(config.redis_url, 5.0) as client:
        pointer = Control(client, config.keyspace()).pointer()
    return None if pointer is None else pointer.generation


def state(config, generation):
    with connect(config.redis_url, 5.0) as client:
        return Releases(config.store(), Control(client, config.keyspace())).state(generation)


def test_a_night_works_on_a_remote_store_and_another_host_opens_it(config, tmp_path):
    config = replace(config, artifacts=f"memory://night-{uuid.uuid4().hex}")
    generation = publish_night(config, UNTIL)

    # The host that built it is gone; only the store is left.
    shutil.rmtree(tmp_path / "state")
    other_host = ArtefactStore(config.store().url, tmp_path / "another-host")
    manifest, root = open_generation(other_host, generation)

    assert manifest.generation == generation == live(config)
    assert root.is_relative_to(tmp_path / "another-host")
    with connect(config.redis_url, 5.0) as client:
        client.delete(config.keyspace().live)
    assert pipeline.restore(config)["generation"] == generation


def test_every_step_can_be_repeated_and_finds_its_own_work(config):
    generation = build_verified(config, UNTIL)
    before = read_manifest(config.store(), generation)

    assert build_verified(config, UNTIL) == generation

    after = read_manifest(config.store(), generation)
    assert (after.tables, after.entity_sets, after.items) == (
        before.tables,
        before.entity_sets,
        before.items,
    )
    assert pipeline.load(config, {"generation": generation})["loaded_bytes"] == 0


def test_a_changed_input_is_another_generation(config):
    first = build_verified(config, UNTIL)
    assert build_verified(config, NEXT) != first
    assert build_verified(replace(config, shards=3), UNTIL) != first
    assert (
        build_verified(replace(config, gates=replace(config.gates, skew_overlap=0.1)), UNTIL)
        == first
    )


def test_a_generation_that_is_live_is_not_built_again(config):
    publish_night(config, UNTIL)
    assert pipeline.begin(config, data_until=UNTIL, run_after=None)["already_live"]


def test_a_gate_that_fails_refuses_and_the_live_generation_stays(config):
    first = publish_night(config, UNTIL)
    strict = replace(config, gates=replace(config.gates, coverage_of_source=1.01))

    with pytest.raises(Refused, match=r"coverage_of_source is .* the threshold 1\.01") as caught:
        build_verified(strict, NEXT)

    assert caught.value.details["rule"] == "coverage_of_source"
    assert live(config) == first
    refused = next(each for each in all_releases(config.store()) if each.action == "refuse")
    assert "coverage_of_source" in refused.reason
    assert state(config, refused.generation) is State.REFUSED
    gates = read_manifest(config.store(), refused.generation).gates
    assert [gate["rule"] for gate in gates if not gate["passed"]] == ["coverage_of_source"]
    with pytest.raises(Conflict, match="refused"):
        pipeline.publish(config, {"generation": refused.generation}, attempt="x")
    assert publish_night(config, NEXT) == refused.generation == live(config)


def test_a_page_that_changed_in_redis_is_noticed_before_publishing(config):
    first = publish_night(config, UNTIL)
    build = pipeline.begin(config, data_until=NEXT, run_after=None)
    pipeline.embed_items(config, build)
    scored = [pipeline.score_shard(config, build, shard) for shard in build["shards"]]
    pipeline.assemble(config, build, scored)
    pipeline.build_index(config, build)
    pipeline.quantize(config, build)
    pipeline.load(config, build)
    with connect(config.redis_url, 5.0) as client:
        client.setrange(
            config.keyspace().page(build["generation"], "user_topk", 0), 40, b"\x00\x01"
        )
    with pytest.raises(Refused, match="pages_in_redis"):
        pipeline.verify(config, build)
    assert live(config) == first


def test_a_file_that_changed_on_disk_is_noticed_before_publishing(config):
    build = {"generation": build_verified(config, UNTIL)}
    root = config.store().local(f"generations/{build['generation']}")
    with (root / "items/vectors.f32").open("r+b") as file:
        file.write(b"\x01")
    with pytest.raises(Refused, match="SHA-256"):
        pipeline.verify(config, build)
    assert live(config) is None


def test_p3_a_gate_that_raises_hangs_or_lacks_its_input_has_failed(config, tmp_path):
    """PITFALLS P3: fail closed."""
    generation = build_verified(config, UNTIL)
    manifest, root = open_generation(config.store(), generation)
    release = threading.Event()

    def raises(_candidate: Candidate) -> Verdict:
        raise ZeroDivisionError

    def hangs(_candidate: Candidate) -> Verdict:
        release.wait(30)
        return Verdict("hangs", True, 1, 1)

    def lacks(candidate: Candidate) -> Verdict:
        return Verdict("lacks", candidate.manifest.facts["nothing"] > 0, 1, 1)

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
        verdicts = run_gates(candidate, [raises, hangs, lacks])
    release.set()
    assert [each.passed for each in verdicts] == [False, False, False]
    assert [each.rule for each in verdicts] == ["raises", "hangs", "lacks"]


def test_loading_is_refused_before_redis_runs_full(config, own_redis):
    config = replace(config, redis_url=own_redis.url)
    with connect(own_redis.url, 5.0) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
    with pytest.raises(Refused) as caught:
        build_verified(config, UNTIL)
    assert caught.value.details["rule"] == "redis_headroom"
    with connect(own_redis.url, 5.0) as client:
        assert not list(client.scan_iter(f"larder:1:{config.namespace}:g:*"))


def test_p9_no_key_belongs_to_a_generation_that_the_registry_does_not_know(config):
    """Invariant 3."""
    publish_night(config, UNTIL)
    publish_night(config, NEXT)
    with connect(config.redis_url, 5.0) as client:
        known = set(Control(client, config.keyspace()).rows())
        found = {
            key.decode().split(":")[4]
            for key in client.scan_iter(f"larder:1:{config.namespace}:g:*")
        }
    assert found and found <= known


def test_p5_p14_and_p20_the_manifest_names_index_recall_model_and_vocabulary_of_one_build(config):
    """PITFALLS P5, P14: one manifest over tables, index and model; recall measured and stored."""
    manifest = read_manifest(config.store(), build_verified(config, UNTIL))
    assert set(manifest.indexes) == {"inner_product", "cosine"}
    assert all(
        index.recall is not None and index.recall > 0.99 for index in manifest.indexes.values()
    )
    agreement = manifest.models["user_tower"].agreement
    assert agreement["batch_invariant"] and agreement["overlap_at_20"] > 0.9
    assert manifest.tables["user_affinity"].labels
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_p17_records_of_a_shard_do_not_depend_on_how_many_threads_made_them(config):
    one = read_manifest(config.store(), build_verified(replace(config, threads=1), UNTIL))
    moved = replace(config, threads=2, artifacts="elsewhere", namespace=f"{config.namespace}-2")
    two = read_manifest(moved.store(), build_verified(moved, UNTIL))
    for name, table in one.tables.items():
        if table.kind == "topk":
            ours = [part.file.sha256 for part in table.parts]
            assert ours == [part.file.sha256 for part in two.tables[name].parts]


def test_a_night_without_a_cut_or_sources_says_what_to_set(config):
    with pytest.raises(ConfigError, match="data_until"):
        pipeline.begin(config, data_until=None, run_after=None)
    empty = replace(config, sources=replace(config.sources, interactions=()))
    with pytest.raises(ConfigError, match=r"sources\.interactions is empty"):
        pipeline.begin(empty, data_until=UNTIL, run_after=None)


def test_retire_sweeps_old_nights_and_keeps_what_a_rollback_needs(config):
    config = replace(config, keep=1, superseded_grace_s=0.0)
    first = publish_night(config, UNTIL)
    second = publish_night(config, NEXT)
    third = publish_night(config, "2026-01-31T00:00:00Z")
    assert config.store().names("generations") == sorted([second, third])
    assert state(config, first) is State.RETIRED
    assert roll_back(config) == second


def run(config, tmp_path, *arguments):
    """The command line in a process of its own, without any configured Redis."""
    command = [sys.executable, "-m", "precompute", "--namespace", config.namespace]
    places = [
        "--artifacts",
        str(config.path(config.artifacts)),
        "--state",
        str(tmp_path / "own-state"),
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    return subprocess.run(
        [*command, *places, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def test_the_shell_says_what_is_wrong_without_a_traceback(config, tmp_path):
    for arguments, said in (
        (["night"], "sources.interactions is empty"),
        (["publish", "20260101T000000Z-000000000000"], "has not finished"),
        (["publish", "../../etc"], "not a generation id"),
        (["roll-back", "--reason", "x"], "no earlier generation"),
        (["restore"], "nothing was ever published"),
        (["block", "--item", "x" * 300], "256 bytes"),
        (["--config", str(tmp_path / "none.toml"), "status"], "does not exist"),
        (["train"], "sources.interactions is empty"),
    ):
        found = run(config, tmp_path, *arguments)
        assert found.returncode == 1, (arguments, found)
        assert said in found.stderr.replace("\n", " "), (arguments, found.stderr)
        assert "Traceback" not in found.stderr


def test_a_shell_without_redis_restores_what_was_published_and_leaves_no_process(config, tmp_path):
    generation = publish_night(config, UNTIL)
    found = run(config, tmp_path, "status")
    assert found.returncode == 0, found.stderr
    assert generation in found.stdout and "live" in found.stdout
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
