"""Opening bundles: what is wrong is refused, with both sides named."""

import shutil

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import BundleError
from cache.store.artefacts import sha256_of
from precompute.bundles import bundle as bundles
from precompute.bundles.bundle import BUNDLE_FILE, Bundle
from tests.models import ITEMS, externalize_weights, train_small


@pytest.fixture
def bundle(tmp_path):
    return train_small(tmp_path / "bundle")


def edit(bundle, change):
    data = orjson.loads((bundle.path / BUNDLE_FILE).read_bytes())
    change(data)
    (bundle.path / BUNDLE_FILE).write_bytes(orjson.dumps(data))


def test_a_written_bundle_opens_with_everything_in_it(bundle):
    reopened_bundle = Bundle.open(bundle.path)

    assert reopened_bundle.digest == bundle.digest
    assert reopened_bundle.item_ids[:2] == (b"item-0", b"item-1")
    assert len(reopened_bundle.item_ids) == ITEMS
    assert set(reopened_bundle.value_models) == {"user_affinity"}
    assert [model.name for model in reopened_bundle.models] == ["user_tower", "item_tower", "user_affinity"]


def test_an_altered_file_is_refused_before_it_is_loaded(bundle):
    path = bundle.path / "user_tower.onnx"
    path.write_bytes(path.read_bytes() + b"x")

    with pytest.raises(BundleError, match=r"user_tower\.onnx has SHA-256 .* says"):
        Bundle.open(bundle.path)


def test_a_missing_file_is_refused(bundle):
    (bundle.path / "item_tower.onnx").unlink()

    with pytest.raises(BundleError, match=r"item_tower\.onnx, which is missing"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("description", [b"[1]", b"null", b"\xff"])
def test_a_description_that_is_no_object_is_refused(bundle, description):
    (bundle.path / BUNDLE_FILE).write_bytes(description)

    with pytest.raises(BundleError, match=r"holds no readable bundle\.json"):
        Bundle.open(bundle.path)


def test_a_path_outside_the_bundle_is_refused(bundle):
    edit(bundle, lambda data: data["item_tower"].update(path="../bundle.onnx"))

    with pytest.raises(BundleError, match="outside"):
        Bundle.open(bundle.path)


def rename(data):
    data["user_tower"]["inputs"][0]["name"] = "past"


def widen(data):
    data["dims"] = 99


def retype(data):
    data["item_tower"]["inputs"][0]["dtype"] = "int64"


def repad(data):
    data["user_tower"]["inputs"][0]["pad"] = 3


def relabel(data):
    data["values"]["user_affinity"]["labels"] = ["only one"]


def recount(data):
    data["items"]["count"] = 7


def reformat(data):
    data["format"] = 2


def forget(data):
    del data["item_tower"]


@pytest.mark.parametrize(
    ("change", "message_parts"),
    [
        (rename, ("'history'", "'past'")),
        (widen, ("16", "99")),
        (retype, ("tensor(int32)", "int64")),
        (repad, ("pads with 3", str(ITEMS))),
        (relabel, ("16", "1 labels")),
        (recount, (str(ITEMS), "7")),
        (reformat, ("2", "1")),
        (forget, ("item_tower",)),
    ],
)
def test_a_mismatch_names_both_sides(bundle, change, message_parts):
    edit(bundle, change)

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.path)

    for message_part in message_parts:
        assert message_part in caught.value.message


@pytest.mark.parametrize(
    ("table", "message_pattern"),
    [
        (pa.table({"id": pa.array([1] * ITEMS)}), "string column"),
        (pa.table({"item": pa.array(["a"] * ITEMS)}), "string column"),
        (pa.table({"id": pa.array(["a"] * ITEMS)}), "twice"),
        (pa.table({"id": pa.array([""] * ITEMS)}), "1 to 256 bytes"),
    ],
)
def test_items_that_are_no_list_of_ids_are_refused(bundle, table, message_pattern):
    path = bundle.path / "items.parquet"
    pq.write_table(table, path)
    edit(bundle, lambda data: data["items"].update(sha256=sha256_of(path)))

    with pytest.raises(BundleError, match=message_pattern):
        Bundle.open(bundle.path)


def test_a_folder_without_a_bundle_says_so(tmp_path):
    with pytest.raises(BundleError, match=r"bundle\.json"):
        Bundle.open(tmp_path)


def test_weights_in_a_file_of_their_own_are_part_of_the_model(bundle):
    original_tower = bundle.user_tower
    weights_file = externalize_weights(bundle.path, "user_tower")

    model = Bundle.open(bundle.path).user_tower

    assert model.weights_path == weights_file and Bundle.read(bundle.path).has_weights
    assert [name for _, name, _ in model.files] == ["models/user_tower.fp32.onnx", "models/user_tower.weights"]
    assert model.digest not in (model.sha256, original_tower.digest) and original_tower.digest == original_tower.sha256
    assert not bundle.has_weights


def test_altered_weights_are_refused_before_they_are_loaded(bundle):
    weights_file = externalize_weights(bundle.path, "user_tower")
    weights_file.write_bytes(b"x" + weights_file.read_bytes()[1:])

    with pytest.raises(BundleError, match=r"user_tower\.weights has SHA-256"):
        Bundle.open(bundle.path)


def unlist(bundle):
    externalize_weights(bundle.path, "user_tower")
    edit(bundle, lambda data: data["user_tower"].pop("weights"))


def of_one_name(bundle):
    (bundle.path / "item").mkdir()
    (bundle.path / "item_tower.onnx").rename(bundle.path / "item/item_tower.onnx")
    externalize_weights(bundle.path, "user_tower", "weights")
    externalize_weights(bundle.path, "item_tower", "weights", path="item/item_tower.onnx")


def outside(bundle):
    externalize_weights(bundle.path, "user_tower")
    (bundle.path.parent / "weights").touch()
    edit(bundle, lambda data: data["user_tower"]["weights"].update(path="../weights"))


def elsewhere(bundle):
    weights_file = externalize_weights(bundle.path, "user_tower")
    (bundle.path / "more").mkdir()
    weights_file.rename(bundle.path / "more/user_tower.weights")
    edit(bundle, lambda data: data["user_tower"]["weights"].update(path="more/user_tower.weights"))


def remove_weights(bundle):
    externalize_weights(bundle.path, "user_tower").unlink()


@pytest.mark.parametrize(
    ("change", "message_pattern"),
    [
        (unlist, r'user_tower keeps weights in user_tower\.weights .* "weights" of user_tower names'),
        (of_one_name, r"two files would have the name models/weights in a generation: rename"),
        (outside, r"names \.\./weights, which is outside the bundle"),
        (elsewhere, r"user_tower has its weights in more/.*: they must be in the folder of user_tower\.onnx"),
        (remove_weights, r"names user_tower\.weights, which is missing"),
    ],
)
def test_weights_that_would_not_be_found_again_are_refused(bundle, change, message_pattern):
    change(bundle)

    with pytest.raises(BundleError, match=message_pattern):
        Bundle.open(bundle.path)


def test_weights_have_a_limit(bundle, monkeypatch):
    externalize_weights(bundle.path, "user_tower")
    monkeypatch.setattr(bundles, "WEIGHTS_BYTES_MAX", 999)

    with pytest.raises(BundleError, match=r"bytes, more than 999: use fewer dimensions"):
        Bundle.read(bundle.path)


def test_models_may_share_their_weights(bundle):
    """One table of items is enough for the tower that sums its rows and the one that gives a row."""
    weights_file = externalize_weights(bundle.path, "user_tower", "table.bin")
    shutil.copyfile(bundle.path / "user_tower.onnx", bundle.path / "user_affinity.onnx")

    def shared(data):
        data["values"] = {"vector": {**data["user_tower"], "entity": "user"}}

    edit(bundle, shared)

    reopened_bundle = Bundle.open(bundle.path)

    assert {model.weights_path for model in (reopened_bundle.user_tower, reopened_bundle.value_models["vector"])} == {
        weights_file
    }
