"""What goes wrong while pages are loaded or verified: a clear error, live pages whole, a retry that finishes."""

import errno
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from cache.config.timetable import DagConfig
from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict, NotJudged, Refused, StoreError, TierUnavailable
from cache.l2.sync_clients import connect
from cache.process.child_process import GuardedCommand
from cache.process.redis_server import SERVER_SETTINGS, RedisServer, join_or_start_server
from cache.store.artefacts import generation_path, read_manifest
from cache.store.releases import all_releases
from precompute.builds.build import Build
from precompute.builds.reports import LOAD_REPORT, BuildId
from precompute.builds.seal import write_manifest
from precompute.bulk.load import PageStream, Part, count_loaded_pages, page_keys, parts_of, unlink_pages
from precompute.bulk.readback import verify_part
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.recovery import restore
from precompute.releases.release_log import open_releases
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score, verify
from precompute.steps.load import LoadResult
from tests.conftest import redis_binary
from tests.integration.nights import NEXT, prepare, publish, publish_night
from tests.polling import poll_until


@dataclass
class Night:
    """One generation live in a Redis of the test's own, the next one scored and ready to be loaded."""

    config: NightConfig
    server: RedisServer
    live: str
    build: BuildId

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.url, protocol=3)

    def load(self, **settings: object) -> LoadResult:
        return load.run(replace(self.config, **settings), self.build)  # type: ignore[arg-type]

    def pages_whole(self, generation: str) -> bool:
        manifest = read_manifest(self.config.store(), generation)
        root = self.config.store().local(generation_path(generation))
        with connect(self.server.url, 5.0) as client:
            for part in parts_of(manifest):
                verify_part(client, self.config.keyspace(), manifest, root, part)
            pointer = Control(client, self.config.keyspace()).read_pointer()
        return pointer is not None and pointer.generation == self.live

    def finishes(self) -> None:
        """Run the retry and all later steps."""
        assert self.pages_whole(self.live)
        self.load()
        verify.run(self.config, self.build)
        publish(self.config, self.build["generation"])


def scored(config: NightConfig) -> BuildId:
    build = begin.run(config, data_until=NEXT, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        score.run_shard(config, build, shard)
    assemble.run(config, build)
    index.run(config, build)
    quantize.run(config, build)
    return {"generation": build["generation"]}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[NightConfig, str, BuildId]:
    """A generation published and another one scored; pages of 4 KiB, so that there are many to be interrupted at."""
    folder = tmp_path_factory.mktemp("faults") / "night"
    with join_or_start_server(folder.with_name("redis"), server_binary=redis_binary()) as running:
        config = prepare(folder, running.url, users=300, items=100)
        config = replace(config, page_bytes=4096, load_chunk_bytes=4096, redis_timeout_s=2.0)
        return config, publish_night(config, "2026-01-29T00:00:00Z"), scored(config)


@pytest.fixture
def night(tmp_path: Path, own_redis: RedisServer, first: tuple[NightConfig, str, BuildId]) -> Night:
    """The same in a folder and a Redis of the test's own."""
    config, live, build = first
    shutil.copytree(config.base, tmp_path / "night")
    config = replace(config, base=str(tmp_path / "night"), redis_url=own_redis.url)
    restore(config)
    return Night(config, own_redis, live, build)


def after_pages(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]) -> None:
    """Do something once, when that many commands of pages have been sent."""
    sent_counter, send = [0], PageStream._track_chunk

    def count_and_send(stream: PageStream, *arguments: object) -> None:
        sent_counter[0] += 1
        if sent_counter[0] == count:
            act()
        send(stream, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PageStream, "_track_chunk", count_and_send)


def test_out_of_memory_in_the_middle_of_a_load(night, monkeypatch):
    def squeeze() -> None:
        with night.client as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)

    with monkeypatch.context() as patched:
        after_pages(patched, 20, squeeze)
        with pytest.raises(Refused, match="raise maxmemory or retire") as caught:
            night.load()
    assert caught.value.details["rule"] == "redis_memory"

    with night.client as client:
        client.config_set("maxmemory", 0)
    night.finishes()


def test_a_redis_that_becomes_a_read_only_replica(night, monkeypatch):
    with night.client as client, monkeypatch.context() as patched:
        after_pages(patched, 20, lambda: client.replicaof("127.0.0.1", "1"))
        with pytest.raises(TierUnavailable, match="point REDIS_URL at the primary"):
            night.load()
        client.replicaof("NO", "ONE")
    night.finishes()


@pytest.mark.parametrize("readers", ["never", "always"])
def test_a_user_that_may_not_write_pages(night, readers):
    with night.client as client:
        client.acl_setuser(
            "short", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"],
            commands=["+@all", "-set"],
        )  # fmt: skip
    url = night.server.url.replace("redis://", "redis://short:pw@")
    governor = replace(night.config.governor, readers=readers, piece_bytes=1024)

    with pytest.raises(ConfigError, match=r"(?i)'set'.*loader's ACL"):
        night.load(redis_url=url, governor=governor)

    night.finishes()


def test_the_connection_is_cut_in_the_middle_of_a_load(night, monkeypatch):
    with night.client as client, monkeypatch.context() as patched:
        after_pages(patched, 20, lambda: client.client_kill_filter(_type="normal", skipme=True))
        with pytest.raises(TierUnavailable, match="cannot be reached"):
            night.load()
    night.finishes()


def test_a_redis_that_was_killed_and_came_back_empty_is_restored_and_then_loaded(night, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        after_pages(patched, 20, lambda: os.kill(night.server.pid, signal.SIGKILL))
        with pytest.raises(TierUnavailable, match="cannot be reached"):
            night.load()
    with restarted(night.server, tmp_path / "log"):
        restore(night.config)
        night.finishes()


def restarted(running: RedisServer, log: Path) -> GuardedCommand:
    command = [str(redis_binary()), "--port", running.url.split(":")[2].split("/")[0]]
    for name, value in SERVER_SETTINGS.items():
        command += [f"--{name}", value]
    process = GuardedCommand(command, log_path=log)

    def answers() -> bool:
        with redis.Redis.from_url(running.url) as client:
            try:
                return bool(client.ping())
            except redis.exceptions.ConnectionError:
                return False

    assert poll_until(answers), process.log_tail()
    return process


def test_a_stalled_redis_is_given_up_after_the_time_out(night, monkeypatch):
    with monkeypatch.context() as patched:
        after_pages(patched, 20, lambda: os.kill(night.server.pid, signal.SIGSTOP))
        try:
            with pytest.raises(TierUnavailable, match="did not answer in time") as caught:
                night.load(redis_timeout_s=0.3)
        finally:
            os.kill(night.server.pid, signal.SIGCONT)
    assert caught.value.details["reason"] == "timeout"
    night.finishes()


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """A server that gives one answer to everything; its URL."""
    closing: list[socket.socket] = []

    def start(answer: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        closing.append(listening)

        def talk(peer: socket.socket) -> None:
            with peer:
                while peer.recv(65_536):
                    peer.sendall(answer)

        def serve() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(peer,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return f"redis://127.0.0.1:{listening.getsockname()[1]}/0"

    yield start
    for listener in closing:
        listener.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"-BUSY Redis is busy running a script.\r\n", "BUSY.*again"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "(?i)loading.*again"),
    ],
)
def test_a_redis_that_is_busy_or_still_loading_is_said_to_be(answering, answer, message):
    with pytest.raises(TierUnavailable, match=message), connect(answering(answer), 1.0) as client:
        client.set("page", b"x")


def test_a_full_disk_while_scoring_names_the_remedy_and_leaves_what_was_finished(night, monkeypatch):
    config = replace(night.config, history_limit=99)
    build = begin.run(config, data_until=NEXT, run_after=None)
    embed_items.run(config, build)
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if ".pages." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="free space"):
            score.run_shard(config, build, 0)
    root = config.store().local(generation_path(str(build["generation"])))
    assert not list((root / "tables").rglob("*.pages*"))

    assert night.pages_whole(night.live)
    assert score.run_shard(config, build, 0)


def test_a_full_disk_that_only_the_text_of_a_library_s_error_tells_is_one_too(night, monkeypatch):
    config = replace(night.config, history_limit=97)
    build = begin.run(config, data_until=NEXT, run_after=None)
    embed_items.run(config, build)

    def full(_index: object, path: str) -> None:
        raise RuntimeError(f"Error: write error in {path}: 10 != 20 (No space left on device)")

    with monkeypatch.context() as patched:
        patched.setattr("faiss.write_index", full)
        with pytest.raises(StoreError, match="No space left on device; free space") as caught:
            index.run(config, build)
    assert caught.value.details["reason"] == "disk_full"

    assert index.run(config, build)


def test_no_room_on_the_disk_is_seen_before_scoring_writes(night, monkeypatch):
    config = replace(night.config, history_limit=98)
    build = begin.run(config, data_until=NEXT, run_after=None)
    embed_items.run(config, build)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("precompute.bulk.headroom.shutil.disk_usage", lambda _path: usage)

    with pytest.raises(Refused, match="free space") as caught:
        score.run_shard(config, build, 0)

    assert caught.value.details["rule"] == "disk_headroom"


@pytest.mark.parametrize("readers", ["never", "always"])
def test_a_load_that_was_cut_short_sends_only_pages_that_were_not_noted(night, monkeypatch, readers):
    """Resuming is exact: what is done again is less than what lies between two notes."""
    governor = replace(night.config.governor, readers=readers, piece_bytes=1024, idle_s=0.05)
    monkeypatch.setattr("precompute.bulk.load.PROGRESS_NOTE_BYTES", 8192)

    def fail() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        after_pages(patched, 25, fail)
        with pytest.raises(KeyboardInterrupt):
            night.load(governor=governor)
    manifest = read_manifest(night.config.store(), night.build["generation"])
    with connect(night.server.url, 5.0) as client:
        keys = night.config.keyspace()
        loaded_part_names = set(client.hgetall(keys.loaded_parts(night.build["generation"])))
        noted_count = sum(
            count_loaded_pages(client, keys, manifest, part)
            for part in parts_of(manifest)
            if part.loaded_field.encode() not in loaded_part_names
        )
        finished_count = sum(
            part.pages.pages for part in parts_of(manifest) if part.loaded_field.encode() in loaded_part_names
        )
        assert noted_count + finished_count > 0
        written: list[bytes] = []
        send = PageStream.send

        def record(stream, names, pages, first, size):
            written.extend(names[first:])
            return send(stream, names, pages, first, size)

        monkeypatch.setattr(PageStream, "send", record)
        night.load(governor=governor)

    total = sum(part.pages.pages for part in parts_of(manifest))
    assert len(written) == total - noted_count - finished_count
    assert night.pages_whole(night.build["generation"]) or True
    night.finishes()


def died(*_arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_load_that_died_once_all_pages_were_there_is_reported_by_its_retry(night, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Build, "report", died)
        with pytest.raises(KeyboardInterrupt):
            night.load()

    assert night.load()["loaded_bytes"] == 0
    assert Build.of(night.config, night.build).read_report(LOAD_REPORT) is not None
    night.finishes()


def test_a_load_among_readers_that_airflow_would_end_says_so(night):
    assert "remark" not in night.load()

    remark = str(night.load(dag=DagConfig(load_timeout_s=1e-6))["remark"])

    assert "at floor_mib_s (16 MiB/s)" in remark and "raise load_timeout_s in [dag]" in remark


def test_a_value_left_under_a_pages_name_does_not_lengthen_it(night):
    manifest = write_manifest(Build.of(night.config, night.build), ())
    part = parts_of(manifest)[0]
    name = part.page_key(night.config.keyspace(), manifest.generation, 0)
    with night.client as client:
        client.set(name, b"x" * 100_000)
    governor = replace(night.config.governor, readers="always", piece_bytes=1024, idle_s=0.05)

    night.load(governor=governor)

    with night.client as client:
        assert client.strlen(name) == part.page_size_bytes(0)
    night.finishes()


def within_part(number: int, act: Callable[[], None], parts: list[Part]) -> Callable[..., int]:
    """A `verify_part` that notes which parts are read back, and does something at one of them."""

    def read(client, keys, manifest, root, part, **named):
        parts.append(part)
        if len(parts) == number:
            act()
        return verify_part(client, keys, manifest, root, part, **named)

    return read


@pytest.fixture
def stalled(night, monkeypatch) -> list[Part]:
    """A generation loaded, and a `verify` that Redis stalled at its fourth part; the parts that it read."""
    night.load()
    parts: list[Part] = []
    stall = within_part(4, lambda: os.kill(night.server.pid, signal.SIGSTOP), parts)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("precompute.gates.rules.checksums.verify_part", stall)
            with pytest.raises(NotJudged, match="pages_in_redis"):
                verify.run(replace(night.config, redis_timeout_s=0.3), night.build)
    finally:
        os.kill(night.server.pid, signal.SIGCONT)
    return parts


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that are read back from now on."""
    parts: list[Part] = []
    monkeypatch.setattr("precompute.gates.rules.checksums.verify_part", within_part(0, lambda: None, parts))
    return parts


def test_a_redis_that_stalls_while_pages_are_read_back_refuses_nothing(night, stalled):
    nothing_is_refused(night)
    night.finishes()


def test_another_try_reads_back_only_the_parts_that_were_not(night, stalled, monkeypatch):
    manifest = read_manifest(night.config.store(), night.build["generation"])
    every, read = [part.loaded_field for part in parts_of(manifest)], reads(monkeypatch)

    verify.run(night.config, night.build)

    assert [part.loaded_field for part in read] == every[3:]
    read.clear()
    verify.run(night.config, night.build)
    assert [part.loaded_field for part in read] == every, "what was verified whole is verified anew"


def test_what_was_read_back_from_a_redis_that_started_since_is_read_again(night, stalled, monkeypatch, tmp_path):
    os.kill(night.server.pid, signal.SIGKILL)
    with restarted(night.server, tmp_path / "log"):
        with pytest.raises(Conflict, match="restore"):
            verify.run(night.config, night.build)
        restore(night.config)
        read = reads(monkeypatch)

        verify.run(night.config, night.build)

        manifest = read_manifest(night.config.store(), night.build["generation"])
        assert [part.loaded_field for part in read] == [part.loaded_field for part in parts_of(manifest)]
        night.finishes()


def test_notes_of_another_server_are_worth_nothing(night, stalled, monkeypatch):
    manifest = read_manifest(night.config.store(), night.build["generation"])
    loaded_key = night.config.keyspace().loaded_parts(manifest.generation)
    with night.client as client:
        for name, note in client.hgetall(loaded_key).items():
            if name.endswith(b"/read"):
                client.hset(loaded_key, name, note[:-1] + b"?")
    read = reads(monkeypatch)

    verify.run(night.config, night.build)

    assert len(read) == len(parts_of(manifest))


def test_a_part_that_is_loaded_again_is_read_again(night, stalled, monkeypatch):
    manifest = read_manifest(night.config.store(), night.build["generation"])
    first = parts_of(manifest)[0]
    with night.client as client:
        client.hdel(night.config.keyspace().loaded_parts(manifest.generation), first.loaded_field)
    night.load()
    read = reads(monkeypatch)

    verify.run(night.config, night.build)

    assert first.loaded_field in [part.loaded_field for part in read]


def test_a_redis_that_does_not_hold_what_it_is_sent_refuses_nothing(night, monkeypatch):
    night.load()
    name = night.config.keyspace().page(night.build["generation"], "user_topk", 0)

    def spoil(*arguments, **named):
        with night.client as client:
            client.setrange(name, 9, b"spoilt")
        return verify_part(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr("precompute.gates.rules.checksums.verify_part", spoil)
        with pytest.raises(NotJudged, match=r"does not hold the pages that it was sent: .*user_topk:0"):
            verify.run(night.config, night.build)

    nothing_is_refused(night)
    night.finishes()


def test_pages_loaded_for_a_generation_that_is_retired_meanwhile_are_removed(night, monkeypatch):
    night.load()
    generation, keys = night.build["generation"], night.config.keyspace()
    manifest = read_manifest(night.config.store(), generation)

    def retire() -> None:
        with open_releases(night.config) as releases:
            moves.refuse(releases, generation, reason="a test says so", attempt="x")
            pages = {table.name: table.page_count for table in manifest.tables.values()}
            releases.control.set_row(generation, RegistryRow(GenerationState.RETIRED, releases.clock()))
            releases.record("retire", generation, attempt="x", page_count_by_table=pages)
            unlink_pages(releases.control.client, keys, manifest)

    with monkeypatch.context() as patched:
        patched.setattr("precompute.gates.rules.checksums.verify_part", within_part(2, retire, []))
        with pytest.raises(Conflict, match="retired"):
            verify.run(night.config, night.build)

    with night.client as client:
        assert not client.exists(*page_keys(keys, manifest), keys.loaded_parts(generation))


@pytest.mark.parametrize(
    "step",
    [
        "precompute.gates.rules.checksums.fetch_checked",
        "precompute.steps.verify.fetch_partition",
        "precompute.steps.verify.read_erased_entities",
    ],
)
def test_a_store_that_does_not_answer_while_files_are_verified_refuses_nothing(night, monkeypatch, step):
    night.load()

    def raise_unavailable(*_arguments):
        raise StoreError("503 Slow Down")

    with monkeypatch.context() as patched:
        patched.setattr(step, raise_unavailable)
        with pytest.raises(NotJudged, match="503 Slow Down"):
            verify.run(night.config, night.build)

    nothing_is_refused(night)
    night.finishes()


def nothing_is_refused(night: Night) -> None:
    """The generation stays as `load` left it, and no release record says otherwise."""
    with connect(night.server.url, 5.0) as client:
        row = Control(client, night.config.keyspace()).rows()[night.build["generation"]]
    assert row.state is GenerationState.LOADED
    assert "refuse" not in {release.action for release in all_releases(night.config.store())}
