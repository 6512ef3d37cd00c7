"""The catalogue of a night: ids as arrays, whatever their number."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from cache.format.ids import hash_id
from cache.format.item_table import Ordinals
from precompute.config.settings import NightConfig, Sources
from precompute.partitions.catalogue import item_id_texts, open_items, write_catalogue
from precompute.sources.columns import text_hashes
from precompute.sources.unusable import UnusableRows
from precompute.sources.vocabulary import Vocabulary, to_string_chunks

ITEMS = 100_000


def bundle_of(texts):
    """What a catalogue is written from."""
    raws = tuple(text.encode() for text in texts)
    vocabulary = Vocabulary.of(to_string_chunks(pa.chunked_array([pa.array(texts)])))
    return SimpleNamespace(vocabulary=vocabulary, item_ids=raws, models=())


def test_a_catalogue_is_written_without_a_python_object_per_item(tmp_path):
    """A dictionary, a list and a set of all ids took 300 bytes each: 3 GB for ten million."""
    texts = [f"item-{number:08d}" for number in range(ITEMS)]
    bundle, config = bundle_of(texts), NightConfig(shards=2)

    tracemalloc.start()
    laid = write_catalogue(config, bundle, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    items = open_items(tmp_path, laid)
    assert peak < 120 * ITEMS
    assert items.count == ITEMS
    assert [items.ordinal_of(texts[at].encode()) >= 0 for at in (0, ITEMS - 1)] == [True, True]
    assert sorted(item_id_texts(items).to_pylist()) == texts


def test_ordinals_ids_and_model_indices_belong_together(tmp_path):
    texts = ["b", "ü", "007", "7", "x" * 256]
    pq.write_table(pa.table({"item": ["7", "ü", "new", "x" * 256]}), tmp_path / "items.parquet")
    config = NightConfig(shards=3, base=str(tmp_path), sources=Sources(item_features="items.parquet"))

    laid = write_catalogue(config, bundle_of(texts), tmp_path, erased_raw_ids=[b"7"])

    items = open_items(tmp_path, laid)
    item_ids = items.ids_of(np.arange(items.count, dtype=np.uint32))
    assert item_ids == sorted(["ü", "new", "x" * 256], key=lambda item_id: hash_id(item_id.encode(), 0))
    expected = [texts.index(item_id) if item_id in texts else -1 for item_id in item_ids]
    assert items.model_indices_of(Ordinals(np.arange(items.count))).tolist() == expected


def test_an_item_listed_again_is_left_out_and_named(tmp_path):
    listed_items = ["a", "b", "a", "c", "b", "a"]
    pq.write_table(pa.table({"item": listed_items}), tmp_path / "items.parquet")
    config = NightConfig(base=str(tmp_path), sources=Sources(item_features="items.parquet"))
    unusable = UnusableRows()

    laid = write_catalogue(config, bundle_of(["a"]), tmp_path, unusable=unusable)

    assert sorted(item_id_texts(open_items(tmp_path, laid)).to_pylist()) == ["a", "b", "c"]
    ((reason, reason_report),) = unusable.to_json()["item_features"]["reasons"].items()
    assert (reason, reason_report["rows"]) == ("listed before", 3)
    assert [case["item"] for case in reason_report["cases"]] == ["a", "b", "a"]


def test_a_table_of_items_without_rows_is_no_catalogue_of_all_that_the_model_knows(tmp_path):
    """A filter on yesterday's date left it empty, and every withdrawn item was recommended again."""
    pq.write_table(pa.table({"item": pa.array([], pa.string())}), tmp_path / "items.parquet")
    config = NightConfig(base=str(tmp_path), sources=Sources(item_features="items.parquet"))

    with pytest.raises(SourceError, match=r"items\.parquet has no rows.*remove .*item_features"):
        write_catalogue(config, bundle_of(["a", "b"]), tmp_path)
    with pytest.raises(SourceError, match=r"items\.parquet has no rows"):
        write_catalogue(config, bundle_of(["a", "b"]), tmp_path, event_item_ids=[b"c"])


def test_ids_with_one_hash_are_distinguished_by_the_next_seed(monkeypatch):
    def colliding(texts, seed):
        return np.zeros(len(texts), np.uint64) if seed == 0 else text_hashes(texts, seed)

    monkeypatch.setattr("precompute.sources.vocabulary.text_hashes", colliding)
    vocabulary = Vocabulary.of(pa.chunked_array([["a", "b"], ["c"]]))
    assert vocabulary is not None
    assert vocabulary.find_positions(pa.array(["c", "d", "a"])).tolist() == [2, -1, 0]
    assert Vocabulary.of(pa.chunked_array([["a", "b"], ["a"]])) is None
