"""A night whose shards are scored by torch: on its processor device, or on the GPU that LARDER_TEST_DEVICE names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.errors import ConfigError
from cache.store.artefacts import generation_path
from precompute.builds.reports import BegunBuild
from precompute.config.devices import devices
from precompute.config.settings import NightConfig
from precompute.reference.train import train_reference
from precompute.scoring.towers import DEVICE_LENGTH_AGREEMENT, DeviceTower
from precompute.steps import begin, embed_items, score
from tests.devices import DEVICE
from tests.integration.night.test_streaming import elsewhere, files_of
from tests.integration.nights import DATA_UNTIL, prepare, publish_night

pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return prepare(tmp_path_factory.mktemp("device"), redis_url, users=400, items=90, seed=6)


def scored(config: NightConfig, shards: list[int]) -> BegunBuild:
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    score.run(config, build, shards)
    return build


def test_the_device_and_the_processor_write_the_same_bytes(
    prepared: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precompute.device import scorer

    scorer_arguments = []
    build_scorer = scorer.DeviceScorer.of

    def of(vectors: Any, metric: Any, device: str) -> Any:
        scorer_arguments.append((metric, device))
        return build_scorer(vectors, metric, device)

    monkeypatch.setattr(scorer.DeviceScorer, "of", of)
    files_by_device = {}
    for device in ("off", DEVICE):
        config = elsewhere(replace(prepared, device=device), tmp_path / device)
        files_by_device[device] = files_of(config, scored(config, [0, 1]))
    assert files_by_device[DEVICE] == files_by_device["off"]
    assert sorted(scorer_arguments) == [(metric, devices(DEVICE)[0]) for metric in ("cosine", "inner_product")]


def test_a_shard_begun_on_a_device_is_finished_on_the_processor(prepared: NightConfig, tmp_path: Path) -> None:
    # Given a worker without a GPU that takes over a shard from one with a GPU
    config = elsewhere(replace(prepared, device=DEVICE), tmp_path / "both")
    build = scored(config, [0])
    score.run(replace(config, device="off"), build, [0, 1])
    alone = elsewhere(replace(prepared, device="off"), tmp_path / "alone")
    assert files_of(config, build) == files_of(alone, scored(alone, [0, 1]))


def with_programs(prepared: NightConfig, folder: Path) -> NightConfig:
    """The same night on the device, of a bundle with programs."""
    config = replace(
        elsewhere(prepared, folder),
        device=DEVICE,
        bundle=str(folder / "bundle"),
        reference=replace(prepared.reference, programs=True),
    )
    train_reference(config, data_until=DATA_UNTIL)
    return config


def test_a_night_by_programs_is_published(
    prepared: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_programs(prepared, tmp_path)
    opened = []
    run_tower = DeviceTower.run

    def run(self: Any, inputs: Any) -> Any:
        opened.append(self._name)
        return run_tower(self, inputs)

    monkeypatch.setattr(DeviceTower, "run", run)
    generation = publish_night(config, DATA_UNTIL)
    root = config.store().local(generation_path(generation))
    assert set(opened) == {"user_tower", "item_tower", "user_affinity"}
    assert (root / "bundle/user_tower.pt2").is_file()


def test_a_shard_whose_towers_moved_between_device_and_processor_passes_the_gates(
    prepared: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a device whose vectors differ in the last bits for every second user, by as much as is allowed
    config = with_programs(prepared, tmp_path)
    moved = []
    compute_outputs = DeviceTower._run_on_device

    def outputs(self: Any, inputs: Any) -> Any:
        vectors = compute_outputs(self, inputs)
        if self._name == "user_tower" and vectors is not None:
            lengths = np.linalg.norm(vectors[::2], axis=1)
            off = np.random.default_rng(len(vectors)).standard_normal(vectors[::2].shape)
            off *= (0.9 * DEVICE_LENGTH_AGREEMENT * lengths / np.linalg.norm(off, axis=1))[:, None]
            moved.append(int((vectors[::2] + off.astype(np.float32) != vectors[::2]).any(axis=1).sum()))
            vectors[::2] += off.astype(np.float32)
        return vectors

    monkeypatch.setattr(DeviceTower, "_run_on_device", outputs)

    assert publish_night(config, DATA_UNTIL)
    assert sum(moved) > 150


def test_a_device_that_is_not_there_is_said_before_anything_is_read(prepared: NightConfig, tmp_path: Path) -> None:
    config = elsewhere(replace(prepared, device="cuda:97"), tmp_path)
    with pytest.raises(ConfigError, match="'cuda:97' is missing"):
        publish_night(config, DATA_UNTIL)
    assert not Path(config.artifacts).exists()
