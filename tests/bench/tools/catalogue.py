"""A night over a catalogue of real size: as many items as Gowalla has, in 128 dimensions; vectors are drawn."""

from pathlib import Path

import numpy as np

from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles import onnx_model
from precompute.bundles.bundle import ModelFile, write_bundle
from precompute.config.settings import NightConfig, Sources, TableConfig
from tests.bench.night import write_interactions
from tests.bench.read_path import DATA_UNTIL, TABLE, Case
from tests.integration.nights import publish_night

ITEMS, DIMS, USERS = 40_981, 128, 2_000


def make_catalogue(folder: Path, redis_url: str) -> Case:
    """Publish a night with the reference model's tower, with random rows instead of trained ones."""
    rng = np.random.default_rng(0)
    # Make the variance fall off like a spectrum: in isotropic vectors no index finds anything.
    rows = rng.standard_normal((ITEMS, DIMS), np.float32) / np.sqrt(1 + np.arange(DIMS, dtype="f4"))
    padded = np.concatenate([rows, np.zeros((1, DIMS), np.float32)])
    history = InputSpec("history", "history", "int32", max_length=512, pad=ITEMS)
    index = InputSpec("item_index", "item_index", "int32")
    names = [str(number) for number in range(ITEMS)]
    write_bundle(
        folder / "bundle",
        name="drawn",
        version="1",
        dims=DIMS,
        item_ids=names,
        user_tower=ModelFile(onnx_model.history_tower(padded), TowerSpec((history,), "vector", DIMS)),
        item_tower=ModelFile(onnx_model.item_tower(rows), TowerSpec((index,), "vector", DIMS), entity="item"),
    )
    drawn = Histories.of([rng.choice(ITEMS, 20, replace=False) for _ in range(USERS)])
    write_interactions(folder / "interactions.parquet", drawn, 1)
    night = NightConfig(
        namespace="catalogue",
        artifacts="artifacts",
        state="state",
        bundle="bundle",
        redis_url=redis_url,
        threads=2,
        warm_timeout_s=5.0,
        sources=Sources(("interactions.parquet",)),
        tables={TABLE: TableConfig(TABLE, k=100)},
        base=str(folder),
    )
    generation = publish_night(night, DATA_UNTIL)
    return Case(folder, night, generation, [], names)
