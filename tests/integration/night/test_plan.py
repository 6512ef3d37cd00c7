"""`python -m precompute plan` beside a real night, on a real Redis: what it foretells, refuses and leaves alone."""

import json
import os
import re
import signal
from dataclasses import replace

import pytest
import redis

from cache.process.host import memory_available_bytes
from cache.store.artefacts import generation_path, read_manifest
from precompute.bulk.load import page_keys, total_bytes
from precompute.config.settings import NightConfig
from precompute.planning.capacity import find_limits
from tests.clusters import cluster
from tests.integration.nights import DATA_UNTIL, build_verified, histories, prepare
from tests.integration.shell import shell

USERS, ITEMS = 600, 150


@pytest.fixture
def config(tmp_path, own_redis):
    return prepare(tmp_path / "night", own_redis.url, users=USERS, items=ITEMS)


def settings(config):
    """The same as a file."""
    path = config.path("larder.toml")
    tables = "".join(
        f'[tables.{name}]\nkind = "{table.kind}"\nk = {table.k}\nprecision = "{table.precision}"\n'
        + (f'metric = "{table.metric}"\n' if table.metric else "")
        + (f'value = "{table.value}"\n' if table.value else "")
        for name, table in config.tables.items()
    )
    path.write_text(
        f'namespace = "{config.namespace}"\nshards = 2\npage_bytes = {config.page_bytes}\nthreads = 1\n'
        'artifacts = "artifacts"\nstate = "state"\nbundle = "bundle"\n'
        '[sources]\ninteractions = "interactions.parquet"\nitem_features = "items.parquet"\n' + tables
    )
    return path


def plan(config, *options, url=None):
    environment = {"PATH": os.environ["PATH"], "HOME": str(config.path("."))}
    if url != "":
        environment["REDIS_URL"] = str(config.redis_url)
    arguments = ("--config", str(settings(config)), "plan", "--seconds", "0.2", "--data-until", DATA_UNTIL)
    return shell(*arguments, *options, environ=environment)


def card_plan(config, *options):
    """`plan --card`, which needs no Redis."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(config.path("."))}
    return shell("--config", str(settings(config)), "plan", *options, environ=environment)


def test_a_plan_on_a_card_takes_the_items_from_the_bundle_and_answers_from_a_table(config):
    completed_process = card_plan(config, "--card", "h200", "--users", "5000", "--json")

    assert completed_process.returncode == 0, completed_process.stderr
    estimate, bundle = (json.loads(completed_process.stdout), json.loads(config.path("bundle/bundle.json").read_text()))
    assert estimate["items"] == bundle["items"]["count"] and estimate["dims"] == bundle["dims"]
    assert estimate["users"] == 5000 and estimate["topk_s"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--card", "h9000", "--users", "5"), "no rates of a card 'h9000': measured were"),
        (("--card", "h200"), "--card counts no users"),
        (("--card", "h200", "--users", "5", "--qps", "4"), "--qps cannot be used with --card"),
        (("--card", "h200", "--users", "5", "--l1-mb", "8"), "--l1-mb cannot be used with --card"),
        (("--card", "h200", "--users", "-5"), "--users must be a number above 0"),
        (
            ("--card", "h200", "--users", "5", "--bundle", "nowhere"),
            "--card needs --items and --dims if there is no bundle",
        ),
    ],
)
def test_a_plan_on_a_card_says_what_it_lacks(config, options, reason):
    completed_process = card_plan(config, *options)

    assert completed_process.returncode == 1
    assert reason in " ".join(completed_process.stderr.split())


def test_a_plan_foretells_the_bytes_of_the_night_that_follows(config):
    store = config.path("artifacts")
    paths_before = sorted(store.rglob("*"))
    with redis.Redis.from_url(config.redis_url) as client:
        completed_process = plan(config, "--json", "--qps", "100", "--gpu-users-per-s", "1e6", "--sample", "0.5")
        assert client.dbsize() == 0
        assert sorted(store.rglob("*")) == paths_before  # nothing of it is left in the store
        assert completed_process.returncode == 0, completed_process.stderr
        estimate = json.loads(completed_process.stdout)
        assert {"begin", "score", "index", "verify"} < set(estimate["step_memory_bytes"])

        manifest = read_manifest(config.store(), build_verified(config, DATA_UNTIL))
        keys = list(page_keys(config.keyspace(), manifest))
        in_redis = sum(client.memory_usage(key) for key in keys)
    parts = [part.file for entity_set in manifest.entity_sets.values() for part in entity_set.parts]
    root = config.store().local(generation_path(manifest.generation))
    on_disk = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert estimate["users"] == manifest.facts["users_in_source"]
    assert sum(estimate["pages"].values()) == pytest.approx(len(keys), abs=4)
    assert estimate["payload_bytes"] == pytest.approx(total_bytes(manifest), rel=0.03)
    assert estimate["redis_bytes"] == pytest.approx(in_redis, rel=0.05)
    assert estimate["directory_bytes"] == sum(file.size_bytes for file in parts)
    mapped = sum(artefact.size_bytes for artefact in manifest.served_artefacts())
    assert estimate["mapped_bytes"] == pytest.approx(mapped, rel=0.05)
    assert estimate["disk_bytes"] == pytest.approx(on_disk, rel=0.1)
    assert {verdict["rule"] for verdict in estimate["verdicts"]} == {
        "redis_headroom", "memory_headroom", "disk_headroom",
    }  # fmt: skip
    assert min(estimate["scoring_gpu_s"], estimate["scoring_s"], estimate["load_s"]) > 0
    assert estimate["scoring_gpu_how"] == "the stated 1,000,000 users/s"
    assert all(0 < l1_row["from_cold"] <= l1_row["steady"] <= 1 for l1_row in estimate["l1"])


def test_a_larger_plan_is_extrapolated_and_says_so(config):
    smaller = json.loads(plan(config, "--json").stdout)
    assert re.match("a table: one NVIDIA H200 did|a measurement on", smaller["scoring_gpu_how"])

    larger = json.loads(
        plan(config, "--json", "--users", "60000", "--items", "1500", "--dims", "32", "--k", "100").stdout
    )

    assert larger["users"] == 60_000
    assert larger["directory_bytes"] == 8 * (larger["users_with_records"] + 1500)
    assert larger["record_bytes"]["user_topk"] == 16 + 6 * 100
    assert larger["record_bytes"]["user_vector"] == 16 + 2 * 32
    assert larger["scoring_cpu_s"] > 5 * smaller["scoring_cpu_s"]
    assert "extrapolated" in larger["scoring_note"] and not smaller["scoring_note"]


def test_a_plan_foresees_a_load_that_airflow_would_end(config):
    """Pages of half a terabyte take over 8 hours at 16 MiB/s; a try of `load` may take four."""
    room = ("--redis-gb", "9e9", "--host-gb", "9e9", "--disk-gb", "9e9")
    options = ("--users", "400000000", "--k", "200", *room)

    estimate = json.loads(plan(config, "--json", *options).stdout)

    (remark,) = estimate["remarks"]
    assert f"up to {estimate['load_beside_readers_max_s']:,.0f} s, at floor_mib_s (16 MiB/s)" in remark
    assert "raise load_timeout_s and verify_timeout_s in [dag]" in remark
    assert json.loads(plan(config, "--json").stdout)["remarks"] == []


def test_a_redis_too_small_for_the_generations_of_a_peak_refuses_and_still_shows_the_plan(config):
    estimate = json.loads(plan(config, "--json").stdout)
    limit = (estimate["generations"] - 1) * estimate["redis_bytes"]
    with redis.Redis.from_url(config.redis_url) as client:
        client.config_set("maxmemory", limit + client.info("memory")["used_memory"])

    completed_process = plan(config)

    assert completed_process.returncode == 1
    assert completed_process.stderr.startswith(
        "refused: the generations of a night at its peak would not fit: redis_headroom"
    )
    assert "reader's host" in completed_process.stdout and "refused" in completed_process.stdout


def test_a_redis_that_may_evict_pages_refuses_before_anything_is_drawn(config):
    with redis.Redis.from_url(config.redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    completed_process = plan(config)

    assert completed_process.returncode == 1
    assert "maxmemory-policy allkeys-lru" in completed_process.stderr and not completed_process.stdout


def test_a_redis_that_does_not_answer_is_named_before_anything_is_drawn(config, own_redis):
    os.kill(own_redis.pid, signal.SIGKILL)

    completed_process = plan(config)

    assert completed_process.returncode == 1
    assert "Traceback" not in completed_process.stderr and not completed_process.stdout


@pytest.mark.parametrize(
    ("option", "rule"),
    [("--redis-gb", "redis_headroom"), ("--host-gb", "memory_headroom"), ("--disk-gb", "disk_headroom")],
)
def test_room_that_is_stated_counts_instead_of_what_is_here(config, option, rule):
    completed_process = plan(config, "--json", option, "1e-5", url="")

    assert completed_process.returncode == 1
    assert re.search(rf"^refused: .*{rule}", completed_process.stderr)
    failed = [verdict["rule"] for verdict in json.loads(completed_process.stdout)["verdicts"] if not verdict["passed"]]
    assert failed == [rule]


def test_a_log_of_requests_replaces_zipf(config, tmp_path):
    users = sorted(histories(config))
    (tmp_path / "log.txt").write_text("\n".join(users[:1] * 99 + users[1:2]))

    options = ("--requests", str(tmp_path / "log.txt"), "--l1-mb", "1", "--qps", "1")
    estimate = json.loads(plan(config, "--json", "--answer-bytes", "0", *options).stdout)

    # Each of two users is missed once; by Zipf's law all users would be.
    assert estimate["l1"][0]["steady"] == 1.0
    assert estimate["l1"][0]["from_cold"] == pytest.approx(1 - 600 / 86_400, abs=0.004)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sample", "2"), "--sample must be above 0 and at most 1"),
        (("--users", "0"), "--users must be a number above 0"),
        (("--redis-nodes", "3"), "--redis-nodes needs --redis-gb"),
        (("--requests", "nowhere.txt"), "nowhere.txt"),
        (("--answer-bytes", "-1"), "--answer-bytes must be 0 or more"),
        (("--zipf", "-1"), "--zipf must be 0 to 10"),
    ],
)
def test_what_cannot_be_asked_is_said_at_once(config, options, message):
    completed_process = plan(config, *options)

    assert (
        completed_process.returncode == 1
        and message in completed_process.stderr
        and "Traceback" not in completed_process.stderr
    )


def test_generations_of_the_namespace_itself_count_as_room(config):
    limits_before = find_limits(config, record_bytes=500)

    build_verified(config, DATA_UNTIL)
    after = find_limits(config, record_bytes=500)

    (node,) = after.nodes
    with redis.Redis.from_url(config.redis_url) as client:
        used = int(client.info("memory")["used_memory"])
    pages = total_bytes(read_manifest(config.store(), config.store().names("generations")[0]))
    assert pages > 200_000
    assert node.other_bytes == pytest.approx(used - pages, abs=pages / 4)
    assert after.disk_bytes == pytest.approx(limits_before.disk_bytes, abs=200 << 20)


def test_without_a_redis_this_host_is_the_node():
    limits = find_limits(NightConfig(), record_bytes=1)

    assert [(node.name, node.page_share) for node in limits.nodes] == [("primary", 1.0)]
    assert limits.nodes[0].limit_bytes == pytest.approx(memory_available_bytes(), rel=0.2)


def test_every_master_of_a_cluster_is_a_node_with_its_share(tmp_path):
    with cluster(tmp_path / "cluster") as running:
        config = replace(NightConfig(base=str(tmp_path)), redis_url=running.url)

        limits = find_limits(config, record_bytes=500)

    assert len(limits.nodes) == 3
    assert sum(node.page_share for node in limits.nodes) == pytest.approx(1)
    assert all(node.limit_bytes > 0 and node.other_bytes > 0 for node in limits.nodes)
