"""For each refusal of a night, a move or the service's start: `larder check` and `status` say it before."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import redis

from cache.config.shared import SharedConfig
from cache.errors import ConfigError, LarderError, StoreError
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.process.redis_server import RedisServer
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.erasures import all_erasures
from infra.cli import check
from precompute.cli.status import read_state, render_status, report_status
from precompute.config.settings import NightConfig
from precompute.events.files import TakenFile, encode_events
from precompute.events.status import event_problems
from precompute.releases.recovery import restore, roll_back
from precompute.steps import begin, take_events
from precompute.steps.night import Night, run_night
from serving import __main__ as serving_program
from tests.integration.nights import DATA_UNTIL, NEXT, environment, prepare, publish_night
from tests.integration.shell import shell

LATER = "2026-02-03T00:00:00Z"


@dataclass(frozen=True)
class Published:
    """A namespace with a live and a previous generation, and the Redis that has both."""

    config: NightConfig
    live: str
    previous: str
    client: "redis.Redis"

    def folder(self, generation: str) -> Path:
        return self.config.store().local(generation_path(generation))


@contextmanager
def two_published(folder: Path, redis_url: str, *, users: int) -> Iterator[Published]:
    config = prepare(folder, redis_url, users=users, items=40)
    previous, live = publish_night(config, DATA_UNTIL), publish_night(config, NEXT)
    with redis.Redis.from_url(redis_url) as client:
        yield Published(config, live, previous, client)


@pytest.fixture
def published(tmp_path: Path, own_redis: RedisServer) -> Iterator[Published]:
    with two_published(tmp_path / "n", own_redis.url, users=60) as two:
        yield two


def begin_night(config: NightConfig) -> None:
    begin.run(config, data_until=LATER, run_after=None)


def replica_of_another_release(published: Published) -> None:
    reads = {"manifest": [99, 99]}
    beat = {"replica": "later", "serving": published.live, "holds": [published.live], "reads": reads}
    published.client.zadd(published.config.keyspace().replicas, {orjson.dumps(beat): published.client.time()[0]})


def unreadable_row(published: Published) -> None:
    published.client.hset(published.config.keyspace().generations, "foo", "garbage")


def lost_pointer(published: Published) -> None:
    published.client.delete(published.config.keyspace().live)


def unreadable_erasure(published: Published) -> None:
    published.config.store().write("erasures/000000000001.json", b"{")


def handed_over_bundle_without_a_file(published: Published) -> None:
    shutil.rmtree(published.config.path(published.config.bundle))
    for items_file in published.config.store().local("bundles").glob("*/items.parquet"):
        items_file.unlink()


def full_redis(published: Published) -> None:
    used_bytes = published.client.info("memory")["used_memory"]
    published.client.config_set("maxmemory", used_bytes + 200_000)  # room for heartbeats


def full_redis_that_evicts(published: Published) -> None:
    full_redis(published)
    published.client.config_set("maxmemory-policy", "volatile-lru")


def lost_erasure(published: Published) -> None:
    erase(published.config, "u1")
    erase(published.config, "u2")
    published.config.store().delete("erasures/000000000001.json")


def lost_erasures(published: Published) -> None:
    erase(published.config, "i1", "--as", "item")
    published.config.store().delete("erasures")


NIGHT_REFUSALS: dict[str, tuple[Callable[[Published], None], Callable[[NightConfig], object], str]] = {
    "a replica of another release": (replica_of_another_release, begin_night, "replica later"),
    "an unreadable row": (unreadable_row, begin_night, "registry row of foo"),
    "a lost pointer": (lost_pointer, begin_night, "lost its pointer"),
    "a lost erasure": (lost_erasure, begin_night, "erasures/000000000001.json"),
    "all erasures lost": (lost_erasures, begin_night, "erasures/000000000001.json"),
    "an unreadable erasure": (unreadable_erasure, begin_night, "erasures/000000000001.json"),
    "a lost file of the bundle": (handed_over_bundle_without_a_file, begin_night, "items.parquet"),
}


@pytest.mark.parametrize("cause", NIGHT_REFUSALS)
def test_what_a_night_refuses_is_to_do_in_check_and_not_well_in_status(published: Published, cause: str) -> None:
    # given a namespace in which a night can run
    damage, run_refused, named_text = NIGHT_REFUSALS[cause]
    assert to_do_texts(published.config) == [] and problem_texts(published.config) == []

    # when it is damaged
    damage(published)

    # then both say so before the night that is refused
    check_texts, status_texts = to_do_texts(published.config), problem_texts(published.config)
    with pytest.raises(LarderError, match=named_text):
        run_refused(published.config)
    assert any(named_text in text for text in check_texts), check_texts
    if cause != "a lost file of the bundle":  # `status` says what is, `check` what a night needs
        assert any(named_text in text for text in status_texts), status_texts


@pytest.mark.parametrize("has_overlays", [False, True])
def test_a_redis_that_may_evict_pages_is_told_by_both(published: Published, has_overlays: bool) -> None:
    published.client.config_set("maxmemory", 10**9)
    published.client.config_set("maxmemory-policy", "allkeys-lru")
    if has_overlays:
        published.client.set("overlay", "x", ex=60)

    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        assert any("maxmemory-policy allkeys-lru" in text and "volatile-lru" in text for text in texts), texts
    with pytest.raises(LarderError, match="allkeys-lru"):
        run_night(Night(published.config, "later", LATER), "load")


@pytest.mark.parametrize("damage", [full_redis, full_redis_that_evicts])
def test_a_redis_without_room_for_the_next_night_is_told_before_it_is_scored(
    tmp_path: Path, own_redis: RedisServer, damage: Callable[[Published], None]
) -> None:
    with two_published(tmp_path / "n", own_redis.url, users=2_000) as published:
        assert to_do_texts(published.config) == [] == problem_texts(published.config)

        damage(published)

        for texts in (to_do_texts(published.config), problem_texts(published.config)):
            (text,) = texts
            assert "Redis has no room for the next night" in text and "maxmemory" in text
        with pytest.raises(LarderError, match="maxmemory"):
            run_night(Night(published.config, "later", LATER), "load")


def test_files_of_events_that_end_before_the_live_generation_are_not_well(published: Published) -> None:
    config = replace(published.config, events=replace(published.config.events, enabled=True))
    generations = [{"roles": ["live"], "events_until": "20-0"}]
    store = config.of_events().store()
    for end_ms, is_well in ((10, False), (20, True)):
        store.write(TakenFile(STREAM_BEGINNING).path, encode_events([], Position(end_ms, 0)))
        problems = event_problems(config, generations)
        assert (problems == []) == is_well
    store.delete("events")
    (problem,) = event_problems(config, generations)
    assert "has events up to 20-0" in problem and "end at 0-0" in problem


def test_a_lost_file_of_events_is_told_before_the_night_that_is_refused(published: Published) -> None:
    config = replace(published.config, events=replace(published.config.events, enabled=True))
    config.of_events().store().write(TakenFile(Position(5, 0)).path, encode_events([], Position(10, 0)))

    with pytest.raises(LarderError, match="events from 0-0 to 5-0 is missing"):
        take_events.run(config)

    for texts in (to_do_texts(config), problem_texts(config)):
        assert any("events from 0-0 to 5-0 is missing" in text for text in texts)


def test_a_lost_erasure_is_written_again_by_the_same_request(published: Published) -> None:
    lost_erasure(published)
    published.config.store().write("erasures/000000000001.done", b'{"at": 1.0}')

    assert erase(published.config, "u1") == 0

    erasures = all_erasures(published.config.store())
    assert [(erasure.number, erasure.entity) for erasure in erasures] == [(1, "u1"), (2, "u2")]
    assert erasures[0].done_at != 1.0
    assert problem_texts(published.config) == []
    begin_night(published.config)


def test_a_readmitted_entity_whose_request_is_lost_is_no_lost_erasure(published: Published) -> None:
    store = published.config.store()
    erase(published.config, "u1")
    erase(published.config, "u1", "--forget", "--reason", "asked to")
    erase(published.config, "u2")
    store.delete("erasures/000000000001.json")

    assert [erasure.entity for erasure in all_erasures(store)] == ["u2"] and problem_texts(published.config) == []


@pytest.mark.parametrize("lost_count", [1, 2])
def test_lost_versions_of_the_blocklist_are_told(published: Published, lost_count: int) -> None:
    # given a version with an erased user, and one with a blocked item above it
    store = published.config.store()
    erase(published.config, "u1")
    assert run_command(published.config, "block", "--item", "i1", "--reason", "x") == 0
    assert problem_texts(published.config) == [] == to_do_texts(published.config)

    # when the newest are lost, and no replica has them in force
    for name in store.names("blocklist")[-lost_count:]:
        store.delete(f"blocklist/{name}")

    # then both commands say so
    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        told = " ".join(texts)
        assert "the audit log has 2: blocks were lost" in told
        assert ("user 'u1'" in told) == (lost_count == 2)


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def no_pages(folder: Path) -> None:
    next((folder / "tables").rglob("*.pages")).unlink()


def half_pages(folder: Path) -> None:
    pages_file = next((folder / "tables").rglob("*.pages"))
    os.truncate(pages_file, pages_file.stat().st_size // 2)


def no_items(folder: Path) -> None:
    shutil.rmtree(folder / "items")


def no_models(folder: Path) -> None:
    shutil.rmtree(folder / "models")


@pytest.mark.parametrize("damage", [no_manifest, no_pages, half_pages, no_items, no_models])
@pytest.mark.parametrize("role", ["live", "previous"])
def test_files_that_the_store_lost_are_told_while_redis_still_answers(
    published: Published, role: str, damage: Callable[[Path], None]
) -> None:
    generation = getattr(published, role)

    damage(published.folder(generation))

    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        (text,) = [text for text in texts if generation in text]
        assert "lacks" in text and ("which is live" if role == "live" else "which is the previous one") in text


@pytest.mark.parametrize("role", ["live", "previous"])
def test_a_manifest_that_is_not_the_released_one_is_told_before_a_restore(published: Published, role: str) -> None:
    generation = getattr(published, role)
    manifest_file = published.folder(generation) / "manifest.json"
    manifest = orjson.loads(manifest_file.read_bytes())
    manifest["created_at"] += 1
    manifest_file.write_bytes(orjson.dumps(manifest))

    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        (text,) = texts
        assert generation in text and "but its release record has" in text and "copy of the store" in text


def test_every_file_of_the_manifest_counts_and_no_other(published: Published) -> None:
    manifest = read_manifest(published.config.store(), published.live)
    artefacts = [*manifest.served_artefacts(), *manifest.page_artefacts()]
    for artefact in artefacts:
        path = published.folder(published.live) / artefact.path
        content = path.read_bytes()
        path.unlink()
        (problem,) = problem_texts(published.config)
        assert artefact.path in problem and "lacks 1 of the files" in problem
        path.write_bytes(content)
    shutil.rmtree(published.folder(published.live) / "work")
    assert problem_texts(published.config) == []


def test_files_that_a_restore_or_a_roll_back_needs_are_told_before_either_fails(published: Published) -> None:
    for generation in (published.live, published.previous):
        shutil.rmtree(published.folder(generation) / "tables")
    status_text = " ".join(problem_texts(published.config))
    published.client.flushall()

    for move in (
        partial(restore, published.config, attempt="refill"),
        partial(roll_back, published.config, target_generation=None, reason="try", attempt="back"),
    ):
        with pytest.raises(LarderError):
            move()

    assert published.live in status_text and published.previous in status_text


def test_room_that_a_night_makes_itself_counts_as_room(tmp_path: Path, own_redis: RedisServer) -> None:
    # given a superseded generation that the next night retires
    patient = prepare(tmp_path / "n", own_redis.url, users=3_000, items=40)
    first, _previous, _live = [publish_night(patient, data_until) for data_until in (DATA_UNTIL, NEXT, LATER)]
    config = replace(patient, superseded_grace_s=0.0, keep=1)
    page_bytes = sum(artefact.size_bytes for artefact in read_manifest(config.store(), first).page_artefacts())

    # when Redis has room for less than one more generation
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", round((client.info("memory")["used_memory"] + page_bytes // 2) / 0.95))

    # then it is no problem where the superseded one goes first, and the night runs; where that stays, it is one
    assert problem_texts(config) == [] and to_do_texts(config) == []
    with pytest.raises(LarderError, match="maxmemory"):
        run_night(Night(patient, "stays", "2026-02-04T00:00:00Z"), "load")
    for texts in (to_do_texts(patient), problem_texts(patient)):
        assert any("Redis has no room for the next night" in text for text in texts)
    run_night(Night(config, "goes", "2026-02-05T00:00:00Z"), "load")


def test_a_disk_without_room_for_one_more_generation_is_told(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_bytes = sum(path.stat().st_size for path in published.folder(published.live).rglob("*") if path.is_file())
    monkeypatch.setattr("precompute.planning.next_night.disk_free_bytes", lambda _folder: live_bytes // 10)

    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        (text,) = texts
        assert "no room for the next night" in text and f"{live_bytes // 10:,} bytes are free" in text


@pytest.mark.parametrize(
    ("setting", "named_text"),
    [
        ('host = "0.0.0.0"', "can be reached from elsewhere"),
        ("live_cores = '100000'", "live_cores names"),
        ("traces = true", "opentelemetry-exporter-otlp-proto-http"),
        ('tokens_file = "none.json"', "none.json"),
        ('tls_certificate = "none.pem"\ntls_key = "none.pem"', "none.pem"),
        ('rerank.diverse.rule = "unknown"', "rerank"),
    ],
)
def test_settings_with_which_the_service_does_not_start_are_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, named_text: str
) -> None:
    settings_file = tmp_path / "larder.toml"
    settings_file.write_text(f"[serving]\nport = 0\n{setting}\n")
    monkeypatch.setenv("LARDER_CONFIG", str(settings_file))
    monkeypatch.chdir(tmp_path)
    if "traces" in setting:
        monkeypatch.setattr("serving.process.start_check._TRACES_DISTRIBUTION", f"{named_text}-absent")

    exit_code = serving_program.main(["--port", "0"])
    refusal_text = capsys.readouterr().err
    check.main(["--json"], prog="larder check")
    check_lines = orjson.loads(capsys.readouterr().out)

    assert exit_code == 2 and named_text in refusal_text
    (settings_line,) = [line for line in check_lines if line["what"] == "settings"]
    assert settings_line["state"] == "to do" and named_text in settings_line["told"]


def test_a_device_that_is_not_there_is_to_do(tmp_path: Path) -> None:
    config = NightConfig(base=str(tmp_path), device="cuda:7")
    with pytest.raises(ConfigError, match="cuda:7") as refusal:
        run_night(Night(config, "try"))

    with pytest.raises(ConfigError) as finding:
        check.check_device(config)

    assert finding.value.message == refusal.value.message
    assert check.check_device(replace(config, device="off"))[0] == "ok"


def test_users_that_only_have_features_are_to_do_where_the_model_needs_a_history(
    published: Published, tmp_path: Path
) -> None:
    (tmp_path / "users.csv").write_text("user_id,age\nu1,3\n")
    sources = replace(published.config.sources, interactions=(), user_features=str(tmp_path / "users.csv"))
    config = replace(published.config, sources=sources)

    with pytest.raises(ConfigError, match="the model takes a history") as refusal:
        begin_night(config)
    with pytest.raises(ConfigError) as finding:
        check.check_bundle(config)

    assert finding.value.message == refusal.value.message


def test_a_state_folder_that_cannot_be_written_is_to_do(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    state_folder = published.config.path(published.config.state)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != state_folder and bool(mode))
    state_folder.mkdir(exist_ok=True)

    (text,) = to_do_texts(published.config)

    assert str(state_folder) in text and "cannot be written" in text


def erase(config: NightConfig, *words: str) -> int:
    return run_command(config, "erase", *words)


def run_command(config: NightConfig, *words: str) -> int:
    """Run a command of nights with these settings; return its exit code."""
    return shell(*words, environ=environment(config)).returncode


@pytest.mark.parametrize(
    ("path", "damage"),
    [
        ("audit/000000000001.json", "a folder"),
        ("blocklist/000000000001.json", "a folder"),
        ("blocklist/000000000001.json", "garbage"),
        ("erasures/000000000001.json", "a folder"),
        ("erasures/000000000001.json", "garbage"),
        ("generations/LIVE/manifest.json", "a folder"),
        ("generations/LIVE/manifest.json", "garbage"),
    ],
)
def test_a_damaged_record_is_named_and_leaves_the_rest_of_status(published: Published, path: str, damage: str) -> None:
    # given a record of each kind, one of them damaged
    erase(published.config, "u1")
    damage_file(published, path, damage)

    # when status is read
    with beating(published.config):
        namespace_status = report_status(published.config, read_state(published.config))

    # then the damaged file or its generation is named, and all that can be read is there
    name = path if "LIVE" not in path else published.live
    assert any(name in problem for problem in namespace_status["problems"]), namespace_status["problems"]
    assert (namespace_status["blocklist_version"] is None) == path.startswith("blocklist/")
    assert (namespace_status["erasures_pending"] is None) == path.startswith("erasures/")
    assert f"live: {published.live}" in "\n".join(map(str, render_status(namespace_status)))


def test_a_bundle_without_fields_leaves_the_rest_of_status(published: Published) -> None:
    damage_file(published, "generations/LIVE/bundle/bundle.json", "[1]")

    namespace_status = report_status(published.config, read_state(published.config))

    assert namespace_status["live"] == published.live and namespace_status["model"] is None


def damage_file(published: Published, path: str, damage: str) -> None:
    """Put a folder or other bytes in the place of a file of the store."""
    file = published.config.store().local(path.replace("LIVE", published.live))
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_text(damage)


@pytest.fixture
def read_only_store(published: Published, monkeypatch: pytest.MonkeyPatch) -> ArtefactStore:
    """Store of the published nights, on a mount that is read-only."""
    store, access = published.config.store(), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != store.local_folder and access(path, mode))
    return store


def test_a_read_only_store_is_told_where_nights_and_blocks_need_it(
    published: Published, read_only_store: ArtefactStore
) -> None:
    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        (text,) = texts
        assert f"the artefact store {read_only_store.url} is read-only here" in text and "mount it writable" in text


@pytest.mark.usefixtures("read_only_store")
def test_a_read_only_store_is_all_that_a_host_of_the_service_needs(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_writing(_store: ArtefactStore, _path: str, _content: bytes) -> bool:
        raise StoreError("read-only file system")

    monkeypatch.setattr(ArtefactStore, "write_once", refuse_writing)
    monkeypatch.setattr(check, "missing_extra", lambda *_words: "the extra precompute is missing")

    state, told = check.check_store(published.config)

    assert state == "ok" and "2 generations" in told


def test_pages_that_redis_lost_are_to_do_in_check_as_in_status(published: Published) -> None:
    manifest = read_manifest(published.config.store(), published.live)
    published.client.delete(published.config.keyspace().page(published.live, next(iter(manifest.tables)), 0))

    for texts in (to_do_texts(published.config), problem_texts(published.config)):
        (text,) = texts
        assert f"Redis lacks pages of the live generation {published.live}" in text and "`larder restore`" in text


def to_do_texts(config: NightConfig) -> list[str]:
    """The texts of all that `check` finds to do for nights of these settings."""
    subjects = ("bundle", "device", "redis", "store")
    lines = [check._run_check(subject, partial(check.CHECK_BY_SUBJECT[subject], config)) for subject in subjects]
    return [line.told for line in lines if line.state == "to do"]


def problem_texts(config: NightConfig) -> list[str]:
    """The problems of `status`, or its error, beside that no replica serves and that a night is due."""
    with beating(config):
        try:
            problems = report_status(config, read_state(config))["problems"]
        except LarderError as error:
            return [error.message]
    return [text for text in problems if not text.startswith("the generation of ")]


@contextmanager
def beating(config: SharedConfig) -> Iterator[None]:
    """A replica that serves the live generation, by its heartbeat."""
    with redis.Redis.from_url(str(config.redis_url)) as client:
        raw_pointer = client.get(config.keyspace().live)
        live = SimpleNamespace(**orjson.loads(raw_pointer)).generation if raw_pointer else None
        beat = orjson.dumps({"replica": "there", "serving": live, "holds": [live] if live else []})
        client.zadd(config.keyspace().replicas, {beat: client.time()[0]})
        yield
        client.zrem(config.keyspace().replicas, beat)
