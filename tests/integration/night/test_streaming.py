"""A shard as a stream: the same bytes however it is cut, nothing left behind when a stage fails."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.model.tower import Tile
from cache.store.artefacts import generation_path
from precompute.builds.reports import BegunBuild, BuildId
from precompute.config.settings import NightConfig
from precompute.partitions.shard_input import read_shard
from precompute.scoring import input_samples
from precompute.scoring import users as users_of_a_shard
from precompute.scoring.pages import PageFile
from precompute.scoring.scorers import Scorers, ScoringHooks
from precompute.scoring.shard_work import ShardWork
from precompute.steps import begin, embed_items, index, quantize, score
from tests.integration.nights import DATA_UNTIL, prepare

SHARDS = 2
STAGES: dict[str, tuple[Any, str]] = {
    "read": (users_of_a_shard, "read_users"),
    "encode": (ShardWork, "add_tower_outputs"),
    "score": (ShardWork, "add_lists"),
    "records": (users_of_a_shard, "add_records"),
    "write": (users_of_a_shard, "write_records"),
    "sums": (PageFile, "_add_to_checksums"),
}
"""Where each stage of a shard is called by its name."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    folder = tmp_path_factory.mktemp("streaming")
    return prepare(folder, redis_url, users=160, items=90, seed=5)


def run_first_steps(config: NightConfig) -> BegunBuild:
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    return build


def files_of(config: NightConfig, build: BuildId) -> dict[str, bytes]:
    root = config.store().local(generation_path(str(build["generation"])))
    paths = [*(root / "tables").rglob("*"), *(root / "directory/user").rglob("*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}


def elsewhere(config: NightConfig, folder: Path) -> NightConfig:
    """The same inputs in a store and a namespace of its own."""
    namespace = f"streaming-{uuid.uuid4().hex}"
    return replace(config, namespace=namespace, artifacts=str(folder / "a"), state=str(folder / "s"))


@pytest.fixture(autouse=True)
def one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of a product differ between one row and several, whatever the chunks are."""
    monkeypatch.setattr("cache.model.tower.CPU_TILE", Tile(1, 1 << 21))


@pytest.fixture(scope="module")
def expected_files(prepared: NightConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    config = elsewhere(prepared, tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache.model.tower.CPU_TILE", Tile(1, 1 << 21))
        build = run_first_steps(config)
        for shard in range(SHARDS):
            score.run_shard(config, build, shard)
    return files_of(config, build)


@pytest.fixture(params=[1, 16])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cores that this process seems to have: with many, a shard is read and worked on by several threads."""
    core_count: int = request.param
    for module in ("user_reading", "shard_work"):
        monkeypatch.setattr(f"precompute.scoring.{module}.usable_cores", lambda: core_count)
    return core_count


@pytest.mark.parametrize(("chunk", "rows"), [(1, 1 << 20), (7, 60), (1000, 1)])
@pytest.mark.usefixtures("cores")
def test_chunks_and_slices_do_not_show_in_the_files(
    prepared: NightConfig,
    expected_files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    rows: int,
) -> None:
    config = elsewhere(prepared, tmp_path)
    build = run_first_steps(config)
    monkeypatch.setattr("precompute.scoring.shard_work.CHUNK_USERS", chunk)
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_ROWS_MAX", rows)
    monkeypatch.setattr("precompute.partitions.shard_input.PIECE_ROWS", 1 + rows // 6)
    monkeypatch.setattr("precompute.partitions.shard_input.PIECE_ROWS_PER_BATCH_MIN", 1)
    progress_calls: list[tuple[str, int, int]] = []
    scorers = Scorers()
    scored = [
        score.run_shard(config, build, shard, scorers=scorers, progress=lambda *each: progress_calls.append(each))
        for shard in range(SHARDS)
    ]
    assert files_of(config, build) == expected_files
    for shard in range(SHARDS):
        steps = [progress_call for progress_call in progress_calls if progress_call[0] == f"score shard {shard}"]
        assert len(steps) >= scored[shard]["users"] // chunk
        assert [completed for _, completed, _ in steps] == sorted(completed for _, completed, _ in steps)
        assert all(completed <= total for _, completed, total in steps)
    assert not list(Path(config.artifacts).rglob(".*.part"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("cores")
def test_a_stage_that_fails_ends_the_shard_and_its_retry_ends_right(
    prepared: NightConfig, expected_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    config = elsewhere(prepared, tmp_path)
    build = run_first_steps(config)
    threads = threading.active_count()
    calls = 0
    holder, name = STAGES[stage]
    works = getattr(holder, name)

    def second_fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConnectionError(f"{stage} failed")
        return works(*arguments)

    def reading_fails(*arguments: Any) -> Iterator[Any]:
        yield next(works(*arguments))
        raise ConnectionError("read failed")

    with monkeypatch.context() as broken:
        broken.setattr("precompute.scoring.shard_work.CHUNK_USERS", 9)
        broken.setattr(holder, name, reading_fails if stage == "read" else second_fails)
        with pytest.raises(ConnectionError, match=f"{stage} failed"):
            score.run_shard(config, build, 0)
    assert threading.active_count() == threads
    assert not files_of(config, build)
    assert not list(Path(config.artifacts).rglob(".*.part"))

    for shard in range(SHARDS):
        score.run_shard(config, build, shard)
    assert files_of(config, build) == expected_files


@pytest.mark.usefixtures("cores")
def test_shards_that_overlap_are_the_same_and_tell_one_at_a_time(
    prepared: NightConfig, expected_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = elsewhere(prepared, tmp_path)
    build = run_first_steps(config)
    monkeypatch.setattr("precompute.scoring.shard_work.CHUNK_USERS", 9)
    telling = threading.Lock()
    progress_calls: list[tuple[str, int, int]] = []

    def progress(label: str, completed: int, total: int) -> None:
        assert telling.acquire(blocking=False)
        progress_calls.append((label, completed, total))
        telling.release()

    scored = score.run(config, build, build["shards"], progress=progress)
    assert files_of(config, build) == expected_files
    assert [shard_report["shard"] for shard_report in scored] == build["shards"]
    whats = [label for label, _, _ in progress_calls if label.startswith("score")]
    first, second = (f"score shard {shard}" for shard in range(SHARDS))
    assert whats.index(second) < len(whats) - whats[::-1].index(first)  # neither waited for the other
    repeated_reports = score.run(config, build, build["shards"])
    assert repeated_reports == scored


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
@pytest.mark.usefixtures("cores")
def test_a_failed_shard_ends_the_others_and_completed_work_is_found_again(
    prepared: NightConfig,
    expected_files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    config = elsewhere(prepared, tmp_path)
    build = run_first_steps(config)
    score.run_shard(config, build, 0)
    finished_files, threads, progress_count = files_of(config, build), threading.active_count(), 0

    def progress(label: str, _completed: int, _total: int) -> None:
        nonlocal progress_count
        progress_count += 1
        if progress_count == 3:
            raise error

    with monkeypatch.context() as small:
        small.setattr("precompute.scoring.shard_work.CHUNK_USERS", 9)
        with pytest.raises(error):
            score.run(config, build, [0, 1, 1], progress=progress)
    assert threading.active_count() == threads and progress_count == 3
    assert files_of(config, build) == finished_files
    assert not list(Path(config.artifacts).rglob(".*.part"))

    score.run(config, build, build["shards"])
    assert files_of(config, build) == expected_files


def test_what_comes_after_scoring_reads_no_whole_shard(
    prepared: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`index` and `quantize` run at the same time; each took 100 to 150 bytes for every row of a shard."""
    config = elsewhere(prepared, tmp_path)
    build = run_first_steps(config)
    scored = [score.run_shard(config, build, shard)["users"] for shard in range(SHARDS)]
    user_counts: list[int] = []

    def read_and_note(*arguments: Any, **named: Any) -> Any:
        shard_input = read_shard(*arguments, **named)
        user_counts.append(len(shard_input.entity_ids))
        return shard_input

    monkeypatch.setattr(input_samples, "read_shard", read_and_note)
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_ROWS_MAX", 50)
    for step in (index.run, quantize.run):
        user_counts.clear()
        step(config, build)
        assert user_counts and max(user_counts) < min(scored) / 4, step.__module__


def test_a_shard_scored_alone_takes_the_least_busy_device(
    prepared: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(elsewhere(prepared, tmp_path), device="off", device_tasks=3)
    build, scorer_arguments = run_first_steps(config), []
    opened: list[Any] = []
    given_back: list[Any] = []

    @contextmanager
    def least_busy(*arguments: Any) -> Iterator[str]:
        opened.append(arguments)
        yield "the least busy"
        given_back.append(arguments)

    def scorers(device: str, tasks: int, _hooks: ScoringHooks) -> Scorers:
        assert not given_back
        scorer_arguments.append((device, tasks))
        return Scorers()

    monkeypatch.setattr(score, "claim_least_busy_device", least_busy)
    monkeypatch.setattr(score, "Scorers", scorers)

    score.run_shard(config, build, 1)
    score.run_shard(config, build, 0, scorers=Scorers())

    assert opened == given_back == [("off", 1, 3)] and scorer_arguments == [("the least busy", 3)]
