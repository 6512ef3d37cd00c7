"""`larder check` on the bundle: a model that a night could not open is named before the night."""

from pathlib import Path

import orjson
import pytest

from cache.errors import BundleError
from infra.cli.check import check_bundle
from precompute.bundles.bundle import BUNDLE_FILE
from precompute.bundles.bundle_store import hand_over
from precompute.config.settings import NightConfig
from tests.models import train_small


def test_a_bundle_whose_models_open_is_ok(tmp_path: Path) -> None:
    bundle = train_small(tmp_path / "bundle")

    state, message = check_bundle(NightConfig(base=str(tmp_path), bundle="bundle"))

    assert state == "ok"
    assert message == f"{bundle.path}: {bundle.name} {bundle.version}"


def test_a_model_that_is_not_what_the_bundle_says_is_named(tmp_path: Path) -> None:
    train_small(tmp_path / "bundle")
    bundle_json = orjson.loads((tmp_path / "bundle" / BUNDLE_FILE).read_bytes())
    bundle_json["item_tower"]["inputs"][0]["dtype"] = "int64"
    (tmp_path / "bundle" / BUNDLE_FILE).write_bytes(orjson.dumps(bundle_json))

    with pytest.raises(BundleError, match="item_tower"):
        check_bundle(NightConfig(base=str(tmp_path), bundle="bundle"))


def test_a_bundle_that_another_one_followed_is_told_before_the_night(tmp_path: Path) -> None:
    config = NightConfig(base=str(tmp_path), bundle="bundle", artifacts=str(tmp_path / "store"))
    old, new = train_small(tmp_path / "bundle"), train_small(tmp_path / "new", seed=1)
    for bundle in (old, new):
        hand_over(config.store(), bundle)

    state, message = check_bundle(config)

    assert state == "to do"
    assert new.digest[:12] in message and f"larder hand-over {old.path}" in message
