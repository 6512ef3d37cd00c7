"""What begin refuses before hours of work, and what of a first pass over the sources a second one leaves."""

import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import orjson
import pyarrow as pa
import pytest

from cache.errors import BundleError, StoreError
from cache.store.artefacts import sha256_of
from precompute.builds.build import Build
from precompute.config.settings import NightConfig
from precompute.partitions.holdout import read_holdout
from precompute.partitions.partition import partition
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions
from precompute.steps import begin
from tests.integration.nights import UNTIL, prepare
from tests.object_stores import Overwriting


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return prepare(tmp_path, redis_url, users=60, items=30)


def test_a_model_whose_weights_lie_beside_its_file_is_refused_by_name(config):
    """It opens in the bundle's folder, and in no generation, which has the file alone."""
    path = config.path(config.bundle) / "user_tower.onnx"
    onnx.save(
        onnx.load(path),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=256,
    )
    told = path.with_name("bundle.json")
    data = orjson.loads(told.read_bytes())
    data["user_tower"]["sha256"] = sha256_of(path)
    told.write_bytes(orjson.dumps(data))

    with pytest.raises(BundleError, match=r"user_tower keeps weights .*external data") as caught:
        begin.run(config, data_until=UNTIL, run_after=None)

    assert caught.value.details["model"] == "user_tower"


def test_a_store_that_lets_the_last_writer_win_is_refused_before_anything_is_read(
    config, monkeypatch
):
    for reader in ("chosen_bundle", "pin"):
        monkeypatch.setattr(begin, reader, lambda _of, reader=reader: pytest.fail(reader))
    overwriting = f"{Overwriting.protocol}://{uuid.uuid4().hex}"

    with pytest.raises(StoreError, match="does not create objects exclusively"):
        begin.run(replace(config, artifacts=overwriting), data_until=UNTIL, run_after=None)


def test_a_second_pass_over_the_sources_leaves_nothing_of_the_first_in_the_holdout(
    config, monkeypatch
):
    once = Build.of(config, begin.run(config, data_until=UNTIL, run_after=None))
    of_first = Ids.of(pa.array(["of the first pass"]))

    def again(*given, late, restart, **named):
        late(Interactions(of_first, of_first, np.zeros(1, np.int64)))
        restart()
        return partition(*given, late=late, restart=restart, **named)

    monkeypatch.setattr(begin, "partition", again)
    twice = replace(config, namespace=f"{config.namespace}-twice")
    found = Build.of(twice, begin.run(twice, data_until=UNTIL, run_after=None))

    assert read_holdout(found.root) == read_holdout(once.root) != {}
