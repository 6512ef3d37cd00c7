"""Opening bundles: what is wrong is refused, with both sides named."""

import shutil

import onnx
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import BundleError
from cache.store.artefacts import sha256_of
from precompute.bundles.bundle import FILE, Bundle
from tests.models import ITEMS, train_small


@pytest.fixture
def bundle(tmp_path):
    return train_small(tmp_path / "bundle")


def edit(bundle, change):
    data = orjson.loads((bundle.path / FILE).read_bytes())
    change(data)
    (bundle.path / FILE).write_bytes(orjson.dumps(data))


def test_a_written_bundle_opens_with_everything_in_it(bundle):
    again = Bundle.open(bundle.path)

    assert again.digest == bundle.digest
    assert again.item_ids[:2] == (b"item-0", b"item-1")
    assert len(again.item_ids) == ITEMS
    assert set(again.values) == {"user_affinity"}
    assert [model.name for model in again.models] == ["user_tower", "item_tower", "user_affinity"]


def test_an_altered_file_is_refused_before_it_is_loaded(bundle):
    path = bundle.path / "user_tower.onnx"
    path.write_bytes(path.read_bytes() + b"x")

    with pytest.raises(BundleError, match=r"user_tower\.onnx has SHA-256 .* says"):
        Bundle.open(bundle.path)


def test_a_missing_file_is_refused(bundle):
    (bundle.path / "item_tower.onnx").unlink()

    with pytest.raises(BundleError, match=r"item_tower\.onnx, which is missing"):
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
    ("change", "words"),
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
def test_a_mismatch_names_both_sides(bundle, change, words):
    edit(bundle, change)

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.path)

    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"id": pa.array([1] * ITEMS)}), "string column"),
        (pa.table({"item": pa.array(["a"] * ITEMS)}), "string column"),
        (pa.table({"id": pa.array(["a"] * ITEMS)}), "twice"),
        (pa.table({"id": pa.array([""] * ITEMS)}), "1 to 256 bytes"),
    ],
)
def test_items_that_are_no_list_of_ids_are_refused(bundle, table, words):
    path = bundle.path / "items.parquet"
    pq.write_table(table, path)
    edit(bundle, lambda data: data["items"].update(sha256=sha256_of(path)))

    with pytest.raises(BundleError, match=words):
        Bundle.open(bundle.path)


def test_a_folder_without_a_bundle_says_so(tmp_path):
    with pytest.raises(BundleError, match=r"bundle\.json"):
        Bundle.open(tmp_path)


def test_a_model_with_weights_beside_its_file_is_refused_by_name_where_it_is_copied(
    bundle, tmp_path
):
    """Only the .onnx would travel with a generation: every step after `begin` would fail, hours later."""
    model, copy = bundle.user_tower, tmp_path / "copies" / "user_tower.onnx"
    beside = onnx.load(model.path)
    onnx.save(
        beside, model.path, save_as_external_data=True, location="weights.bin", size_threshold=64
    )
    copy.parent.mkdir()
    shutil.copyfile(model.path, copy)

    bundle.try_models()
    with pytest.raises(BundleError, match=r"user_tower keeps weights .*external data.*as one file"):
        bundle.try_models(lambda each: copy if each is model else each.path)
    (model.path.parent / "weights.bin").unlink()
    with pytest.raises(BundleError, match="not a model that ONNX Runtime opens"):
        bundle.try_models(lambda each: copy if each is model else each.path)
