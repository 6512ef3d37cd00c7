"""Faults that nights have had, each planted in a copy of a valid generation."""

import itertools
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import faiss
import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.manifest import Manifest
from cache.records import NO_ITEM
from precompute.partitions.shard_files import BASE_FILE_KINDS
from tests.integration.corpus import Spoilt

Fault = Callable[[Spoilt], None]


def permuted(count: int, seed: int = 5) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)


def vectors_of(spoilt: Spoilt) -> NDArray[np.float32]:
    items = spoilt.manifest.items
    return spoilt.array(items.vectors.path, "<f4").reshape(items.count, items.dims)


# Ids and places


def ids_of(spoilt: Spoilt) -> list[bytes]:
    offsets = spoilt.array("items/offsets.bin", "<u8").tolist()
    raw = (spoilt.root / "items/ids.bin").read_bytes()
    return [raw[start:end] for start, end in itertools.pairwise(offsets)]


def put_ids(spoilt: Spoilt, ids: list[bytes]) -> None:
    spoilt.write("items/ids.bin", b"".join(ids))
    spoilt.write("items/offsets.bin", np.cumsum([0, *map(len, ids)]).astype("<u8"))


def ids_shuffled(spoilt: Spoilt) -> None:
    ids = ids_of(spoilt)
    ids = [ids[position] for position in permuted(len(ids))]
    put_ids(spoilt, ids)


def items_of_another_night(spoilt: Spoilt) -> None:
    ids = ids_of(spoilt)
    ids = [b"old-" + item_id for item_id in ids]
    put_ids(spoilt, ids)


def item_twice(spoilt: Spoilt) -> None:
    ids = ids_of(spoilt)
    ids[1] = ids[0]
    put_ids(spoilt, ids)


def entity_twice(spoilt: Spoilt) -> None:
    hashes = spoilt.array("directory/user/0000.u64", "<u8")
    hashes[5] = hashes[4]
    spoilt.write("directory/user/0000.u64", hashes)


def directory_unsorted(spoilt: Spoilt) -> None:
    hashes = spoilt.array("directory/user/0001.u64", "<u8")
    spoilt.write("directory/user/0001.u64", hashes[::-1].copy())


def user_unknown(spoilt: Spoilt) -> None:
    hashes = spoilt.array("directory/user/0000.u64", "<u8")
    hashes[7] += np.uint64(1)
    spoilt.write("directory/user/0000.u64", hashes)


def partition_of_another_shard(spoilt: Spoilt) -> None:
    for kind in BASE_FILE_KINDS:
        folder = spoilt.root / "work/partition"
        shutil.copyfile(folder / f"0001.{kind}", folder / f"0000.{kind}")


def half_the_users(spoilt: Spoilt) -> None:
    for shard, part in enumerate(spoilt.data["entity_sets"]["user"]["parts"]):
        hashes = spoilt.array(part["file"]["path"], "<u8")
        part["count"] = len(hashes) // 2
        spoilt.write(part["file"]["path"], hashes[: part["count"]])
        for name, table in spoilt.manifest.tables.items():
            if table.entity == "user":
                spoilt.put(name, shard, spoilt.records(name, shard)[: part["count"]])
    spoilt.data["entity_sets"]["user"]["count"] = sum(
        part["count"] for part in spoilt.data["entity_sets"]["user"]["parts"]
    )


def last_page_cut_off(spoilt: Spoilt) -> None:
    table = spoilt.table("user_topk")
    spoilt.put("user_topk", 1, spoilt.records("user_topk", 1)[: -table.records_per_page])


def shifted_by_one_entity(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: np.roll(records, 1))


def pages_exchanged(spoilt: Spoilt) -> None:
    records, per_page = spoilt.records("user_topk", 0), spoilt.table("user_topk").records_per_page
    records[: 2 * per_page] = np.roll(records[: 2 * per_page], per_page)
    spoilt.put("user_topk", 0, records)


def bodies_exchanged(spoilt: Spoilt) -> None:
    def edit(records: NDArray[Any]) -> None:
        fingerprints = records["fingerprint"].copy()
        records[:] = np.roll(records, 1)
        records["fingerprint"] = fingerprints

    spoilt.change("user_topk", edit)


def sums_of_another_part(spoilt: Spoilt) -> None:
    parts = spoilt.table("user_vector").parts
    sums = spoilt.array(parts[0].sums.path, "<u8")
    spoilt.write(parts[0].sums.path, np.roll(sums, 1) if len(sums) > 1 else sums + np.uint64(1))


# Lists


def off_by_one(spoilt: Spoilt) -> None:
    count = spoilt.manifest.items.count

    def edit(records: NDArray[Any]) -> None:
        used = records["items"] != NO_ITEM
        records["items"][used] = (records["items"][used] + 1) % count

    spoilt.change("user_topk", edit)


def unknown_ordinals(spoilt: Spoilt) -> None:
    count = spoilt.manifest.items.count
    spoilt.change("user_topk", lambda records: records["items"].__setitem__((slice(None), 3), count + 9))


def item_twice_in_a_list(spoilt: Spoilt) -> None:
    def edit(records: NDArray[Any]) -> None:
        records["items"][:, 1] = records["items"][:, 0]

    spoilt.change("user_topk", edit)


def hole_in_lists(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: records["items"].__setitem__((slice(3), 2), NO_ITEM))


def shortened(records: NDArray[Any], rows: slice, count: int) -> None:
    records["count"][rows] = count
    records["items"][rows, count:] = NO_ITEM
    records["numbers"][rows, count:] = 0


def empty_lists(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: shortened(records, slice(None, None, 20), 0))


def short_lists(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: shortened(records, slice(None, None, 5), 10))


def scores_negated(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: records.__setitem__("numbers", -records["numbers"]))


def scores_doubled(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: records.__setitem__("exponent", records["exponent"] + 1))


def nan_scores(spoilt: Spoilt) -> None:
    spoilt.change("user_topk", lambda records: records["numbers"].__setitem__((2, 4), np.nan))


def constant_lists(spoilt: Spoilt) -> None:
    def edit(records: NDArray[Any]) -> None:
        for name in ("items", "numbers", "exponent", "count"):
            records[name] = records[name][0]

    spoilt.change("user_topk", edit)


def popularity_collapsed(spoilt: Spoilt) -> None:
    """Give most users the popular items."""

    def edit(records: NDArray[Any]) -> None:
        for name in ("items", "numbers", "exponent", "count"):
            records[name][: len(records) * 2 // 3] = records[name][0]

    spoilt.change("user_topk", edit)


def live_lists(spoilt: Spoilt, restamp: bool) -> None:
    """Put the previous night's records under tonight's directory, for users that both know."""
    live_manifest = Manifest.from_bytes((spoilt.live_root / "manifest.json").read_bytes())
    table = live_manifest.tables["user_topk"]
    for part in range(len(table.parts)):
        old = np.fromfile(spoilt.live_root / table.parts[part].file.path, table.layout.dtype)
        records = spoilt.records("user_topk", part)
        _, record_indices, theirs = np.intersect1d(records["fingerprint"], old["fingerprint"], return_indices=True)
        stamp = records["scored_at"][0]
        records[record_indices] = old[theirs]
        if restamp:
            records["scored_at"] = stamp
        spoilt.put("user_topk", part, records)


def stale_copy(spoilt: Spoilt) -> None:
    live_lists(spoilt, restamp=True)


def pages_of_last_night(spoilt: Spoilt) -> None:
    live_lists(spoilt, restamp=False)


def similar_items_shifted(spoilt: Spoilt) -> None:
    def edit(records: NDArray[Any]) -> None:
        records["items"] = np.roll(records["items"], 1, axis=0)

    spoilt.change("item_similar", edit)


def defaults_unknown(spoilt: Spoilt) -> None:
    data = orjson.loads((spoilt.root / "defaults.json").read_bytes())
    data["user_topk"]["items"][0] = "no-such-item"
    spoilt.write("defaults.json", orjson.dumps(data))


def defaults_empty(spoilt: Spoilt) -> None:
    spoilt.write("defaults.json", orjson.dumps({}))


# Numbers


def nan_item_vectors(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    vectors[3, 2] = np.nan
    spoilt.write("items/vectors.f32", vectors)


def infinite_user_vectors(spoilt: Spoilt) -> None:
    spoilt.change("user_vector", lambda records: records["numbers"].__setitem__((1, 0), np.inf))


def zero_user_vectors(spoilt: Spoilt) -> None:
    spoilt.change("user_vector", lambda records: records.__setitem__("numbers", 0))


def constant_values(spoilt: Spoilt) -> None:
    spoilt.change("user_affinity", lambda records: records.__setitem__("numbers", records["numbers"][0]))


def same_values_for_all(spoilt: Spoilt) -> None:
    table = spoilt.table("user_affinity")
    values = spoilt.records("user_affinity", 0)["numbers"][0].copy()
    for shard in range(len(table.parts)):
        records = spoilt.records("user_affinity", shard)
        records["numbers"] = values
        spoilt.put("user_affinity", shard, records)


def values_doubled(spoilt: Spoilt) -> None:
    def edit(records: NDArray[Any]) -> None:
        records["numbers"] *= 2

    spoilt.change("user_affinity", edit)


def item_vectors_stale(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("items/vectors.f32")


def wrong_dimension(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    spoilt.write("items/vectors.f32", np.ascontiguousarray(vectors[:, :-1]))
    spoilt.data["items"]["dims"] -= 1


# Models


def model_swapped(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("models/user_tower.fp32.onnx")


def model_swapped_and_declared(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("models/item_tower.fp32.onnx")
    entry = Manifest.from_bytes((spoilt.other_root / "manifest.json").read_bytes()).models["item_tower"]
    spoilt.data["models"]["item_tower"]["digest"] = entry.digest


def bundle_swapped(spoilt: Spoilt) -> None:
    shutil.rmtree(spoilt.root / "bundle")
    shutil.copytree(spoilt.other_root / "bundle", spoilt.root / "bundle")


def int8_lists_swapped(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("models/user_tower.int8.onnx")


def int8_items_swapped(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("models/item_tower.int8.onnx")


def int8_values_swapped(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("models/user_affinity.int8.onnx")


def int8_values_broken(spoilt: Spoilt) -> None:
    spoilt.write("models/user_affinity.int8.onnx", b"no model")


def vocabulary_shuffled(spoilt: Spoilt) -> None:
    index = spoilt.array("items/model_index.i64", "<i8")
    spoilt.write("items/model_index.i64", index[permuted(len(index))])


def vocabulary_shifted(spoilt: Spoilt) -> None:
    index = spoilt.array("items/model_index.i64", "<i8")
    spoilt.write("items/model_index.i64", (index + 1) % len(index))


# Index


def write_index(spoilt: Spoilt, metric: str, index: Any, vectors: NDArray[np.float32]) -> None:
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(spoilt.root / f"index/{metric}.faiss"))


def index_with_one_probe(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], 6, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 1
    write_index(spoilt, "inner_product", index, vectors)


def index_quantizer_off(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    kind = faiss.ScalarQuantizer.QT_4bit
    index = faiss.IndexScalarQuantizer(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    write_index(spoilt, "inner_product", index, vectors)


def index_of_another_night(spoilt: Spoilt) -> None:
    spoilt.copy_from_other("index/inner_product.faiss")


def index_of_a_like_night(spoilt: Spoilt) -> None:
    """Replace the index by one so similar that recall alone would not notice."""
    vectors = vectors_of(spoilt)
    noise = np.random.default_rng(3).standard_normal(vectors.shape).astype(np.float32)
    near = vectors * (1 + 0.01 * noise)
    write_index(spoilt, "inner_product", faiss.IndexFlatIP(vectors.shape[1]), near)


def index_shuffled(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    shuffled = vectors[permuted(len(vectors))]
    write_index(spoilt, "inner_product", faiss.IndexFlatIP(vectors.shape[1]), shuffled)


def index_by_distance(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    write_index(spoilt, "inner_product", faiss.IndexFlatL2(vectors.shape[1]), vectors)


def cosine_without_lengths(spoilt: Spoilt) -> None:
    shutil.copyfile(spoilt.root / "index/inner_product.faiss", spoilt.root / "index/cosine.faiss")


def metric_exchanged(spoilt: Spoilt) -> None:
    spoilt.data["tables"]["item_similar"]["producer"]["index"] = "inner_product"


def index_cut_off(spoilt: Spoilt) -> None:
    vectors = vectors_of(spoilt)
    write_index(spoilt, "cosine", faiss.IndexFlatIP(vectors.shape[1]), vectors[:-3])


def holdout_lost(spoilt: Spoilt) -> None:
    (spoilt.root / "work/holdout.json").unlink()


FAULTS: Mapping[str, tuple[Fault, str]] = {
    fault.__name__: (fault, rule)
    for fault, rule in (
        (ids_shuffled, "known_ids"), (items_of_another_night, "known_ids"), (item_twice, "known_ids"),
        (entity_twice, "directories_sorted"), (directory_unsorted, "directories_sorted"),
        (user_unknown, "known_ids"), (partition_of_another_shard, "known_ids"),
        (half_the_users, "coverage_of_source"), (last_page_cut_off, "record_ids"),
        (shifted_by_one_entity, "record_ids"), (pages_exchanged, "record_ids"),
        (bodies_exchanged, "exact_lists"), (sums_of_another_part, "page_sums"),
        (off_by_one, "exact_lists"), (unknown_ordinals, "lists_whole"),
        (item_twice_in_a_list, "lists_whole"), (hole_in_lists, "lists_whole"),
        (empty_lists, "empty_lists"), (short_lists, "short_lists"), (scores_negated, "lists_whole"),
        (scores_doubled, "exact_lists"), (nan_scores, "finite"), (constant_lists, "distinct_lists"),
        (popularity_collapsed, "distinct_lists"), (stale_copy, "stale_lists"),
        (pages_of_last_night, "record_headers"), (similar_items_shifted, "exact_lists"),
        (defaults_unknown, "defaults"), (defaults_empty, "defaults"), (nan_item_vectors, "finite"),
        (infinite_user_vectors, "finite"), (zero_user_vectors, "exact_numbers"),
        (constant_values, "exact_numbers"), (same_values_for_all, "distinct_values"),
        (values_doubled, "value_psi"), (item_vectors_stale, "item_vectors"),
        (wrong_dimension, "dimension"), (model_swapped, "bundle"),
        (model_swapped_and_declared, "bundle"), (bundle_swapped, "bundle"),
        (int8_lists_swapped, "int8_overlap"), (int8_items_swapped, "int8_cosine"),
        (int8_values_swapped, "int8_overlap"), (int8_values_broken, "live_models"),
        (vocabulary_shuffled, "vocabulary"),
        (vocabulary_shifted, "vocabulary"), (index_with_one_probe, "index_recall"),
        (index_quantizer_off, "index_vectors"), (index_of_another_night, "index_vectors"),
        (index_of_a_like_night, "index_vectors"), (index_shuffled, "index_recall"),
        (index_by_distance, "index_recall"), (cosine_without_lengths, "index_vectors"),
        (metric_exchanged, "exact_lists"), (index_cut_off, "index_recall"),
        (holdout_lost, "heldout_recall"),
    )
}  # fmt: skip
"""Name -> (fault, the rule that must name it)."""
