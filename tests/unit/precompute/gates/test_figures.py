"""The figures that gates compare: shifts, cosines, lists recomputed, faults counted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from cache.format.ids import fingerprints
from cache.format.manifest import Artefact, Producer, Table, TablePart
from cache.model.tower import Histories
from cache.records import NO_ITEM, Layout, dequantize, encode_topk
from precompute.gates.evidence.evidence import Scan, compared_depth, scan_table
from precompute.gates.evidence.user_sample import sampled_shards
from precompute.gates.rules.exact import _check_lists_best, _rows_equal
from precompute.gates.rules.live import psi

ITEMS, K, CUT = 50, 10, 1_769_904_000


def test_the_psi_of_a_sample_with_its_like_is_small_and_of_a_shift_large() -> None:
    rng = np.random.default_rng(1)
    baseline_sample = rng.standard_normal(20_000)

    assert psi(rng.standard_normal(20_000), baseline_sample) < 0.01
    assert psi(rng.standard_normal(20_000) + 1, baseline_sample) > 0.25
    assert psi(baseline_sample * 50, baseline_sample) > 1
    assert np.isnan(psi(np.empty(0), baseline_sample))


def test_a_constant_baseline_still_notices_a_shift() -> None:
    assert psi(np.full(1000, 2.0), np.full(1000, 1.0)) > 1
    assert psi(np.full(1000, 1.0), np.full(1000, 1.0)) == pytest.approx(0)


def test_small_catalogues_are_compared_less_deep() -> None:
    assert [compared_depth(100, items) for items in (4, 80, 41_000)] == [1, 10, 20]
    assert compared_depth(5, 41_000) == 5


def test_many_shards_are_sampled_over_the_whole_range() -> None:
    small_entity_set, large_entity_set = (SimpleNamespace(parts=range(count)) for count in (3, 1024))
    assert sampled_shards(cast(Any, small_entity_set)) == [0, 1, 2]
    shard_numbers = sampled_shards(cast(Any, large_entity_set))
    assert len(shard_numbers) == 16 and shard_numbers[0] == 0 and shard_numbers[-1] == 960


def world() -> tuple[NDArray[np.float64], NDArray[np.float32], Histories]:
    rng = np.random.default_rng(2)
    users = rng.standard_normal((6, 8))
    items = rng.standard_normal((ITEMS, 8)).astype(np.float32)
    return users, items, Histories.of([rng.choice(ITEMS, 5, replace=False) for _ in users])


def lists_of(
    users: NDArray[np.float64], items: NDArray[np.float32], seen_items: Histories, metric: str
) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    scores = users @ items.T.astype(np.float64)
    if metric == "cosine":
        scores /= np.linalg.norm(users, axis=1, keepdims=True) * np.linalg.norm(items, axis=1)
    for row in range(len(users)):
        scores[row, seen_items.indices[seen_items.indptr[row] : seen_items.indptr[row + 1]]] = -np.inf
    order = np.argsort(-scores, axis=1)[:, :K]
    return order.astype(np.uint32), np.take_along_axis(scores, order, axis=1)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_lists_recomputed_in_float64_are_distinguished_from_wrong_lists(metric: str) -> None:
    users, items, seen_items = world()
    ordinals, scores = lists_of(users, items, seen_items, metric)
    counts = np.full(len(users), K)

    def right(
        listed_ordinals: NDArray[np.uint32], listed_scores: NDArray[np.float64], list_lengths: Any = counts
    ) -> Any:
        layout = Layout("topk", K, "f4")
        return _check_lists_best(
            users, items, seen_items, listed_ordinals, list_lengths, listed_scores, layout, metric
        ).tolist()

    assert right(ordinals, scores) == [True] * 6
    for spoil in (
        (ordinals + 1) % ITEMS, np.roll(ordinals, 1, axis=0), ordinals[:, ::-1],
        np.where(np.arange(K) == K - 1, 7, ordinals),
    ):  # fmt: skip
        assert not all(right(spoil.astype(np.uint32), scores))
    assert not any(right(ordinals, scores * 1.5))
    shorter = counts.copy()
    shorter[2] = K - 1
    assert right(ordinals, scores, shorter) == [True, True, False, True, True, True]


def test_lists_under_a_filter_are_the_best_of_what_passes() -> None:
    users, items, seen_items = world()
    allowed = np.arange(ITEMS) % 3 > 0
    among = Histories.of([
        [*seen_items.indices[seen_items.indptr[row] : seen_items.indptr[row + 1]], *np.flatnonzero(~allowed)]
        for row in range(len(users))
    ])  # fmt: skip
    ordinals, scores = lists_of(users, items, among, "inner_product")
    counts = np.full(len(users), K)
    unfiltered_ordinals, all_scores = lists_of(users, items, seen_items, "inner_product")

    def right(listed_ordinals: NDArray[np.uint32], listed_scores: NDArray[np.float64], mask: Any) -> Any:
        layout = Layout("topk", K, "f4")
        return _check_lists_best(
            users, items, seen_items, listed_ordinals, counts, listed_scores, layout, "inner_product", mask
        )

    assert right(ordinals, scores, allowed).all()
    assert not right(ordinals, scores, None).all()
    assert not right(unfiltered_ordinals, all_scores, allowed).all()


def test_rows_are_compared_with_their_largest_number() -> None:
    expected = np.array([[1.0, 1e-9], [0, 0], [1, 1]])
    observed_rows = np.array([[1.0, 2e-9], [0, 0], [1, 1.01]])
    assert _rows_equal(expected, observed_rows, 1e-3).tolist() == [True, True, False]


def scanned(folder: Path, edit: Any = None, *, sums: bool = True, cut: bool = False) -> Scan:
    """One part of 40 lists in pages of 8, spoilt by `edit`."""
    layout = Layout("topk", K, "f2")
    rng = np.random.default_rng(4)
    items = np.array([rng.choice(ITEMS, K, replace=False) for _ in range(40)], np.uint32)
    scores = -np.sort(-rng.random((40, K)).astype(np.float32), axis=1) - np.float32(0.3)
    user_fingerprints = fingerprints([f"user-{row}".encode() for row in range(40)])
    records = encode_topk(layout, user_fingerprints, items, scores, CUT)
    if edit is not None:
        edit(records)
    size, raw = 8 * layout.size_bytes, records.tobytes()
    (folder / "p.pages").write_bytes(raw[:-3] if cut else raw)
    page_checksums = [xxhash.xxh3_64_intdigest(raw[start : start + size]) for start in range(0, len(raw), size)]
    np.array(page_checksums if sums else page_checksums[::-1], "<u8").tofile(folder / "p.sums")
    file, checks = (Artefact(f"p.{kind}", 0, "") for kind in ("pages", "sums"))
    parts = (TablePart(0, 5, 40, file, checks),)
    table = Table("user_topk", "user", Producer("topk"), layout, 8, parts, ())
    manifest = SimpleNamespace(items=SimpleNamespace(count=ITEMS), data_until=CUT)
    return scan_table(folder, cast(Any, manifest), table)


def test_whole_records_have_no_fault(tmp_path: Path) -> None:
    scan = scanned(tmp_path)
    assert not scan.fault_counts and scan.record_count == 40 and scan.lists_by_length[K] == 40
    assert scan.slots_by_item.sum() == 40 * K


@pytest.mark.parametrize(
    ("edit", "kind", "count"),
    [
        (lambda records: records["numbers"].__setitem__((3, 1), np.nan), "finite", 1),
        (lambda records: records["numbers"].__setitem__((3, 9), -np.inf), "finite", 1),
        (lambda records: records["items"].__setitem__((slice(2), 4), ITEMS), "ordinals", 2),
        (lambda records: records["items"].__setitem__((7, 4), NO_ITEM), "slots", 1),
        (lambda records: records["count"].__setitem__(5, K - 2), "slots", 1),
        (lambda records: records["count"].__setitem__(5, K + 1), "headers", 1),
        (lambda records: records["items"].__setitem__((9, 1), records["items"][9, 0]), "twice", 1),
        (lambda records: records["numbers"].__setitem__(6, records["numbers"][6, ::-1]), "order", 1),
        (lambda records: records["scored_at"].__setitem__(8, CUT - 1), "headers", 1),
        (lambda records: records["flags"].__setitem__(8, 0), "headers", 1),
        (lambda records: records["flags"].__setitem__(8, 0x11), "headers", 1),
    ],
)  # fmt: skip
def test_every_fault_of_a_record_is_counted(tmp_path: Path, edit: Any, kind: str, count: int) -> None:
    scan = scanned(tmp_path, edit)
    assert scan.fault_counts[kind] == count and "p.pages" in scan.first_location_by_fault[kind]


def test_a_fault_is_counted_with_where_it_was_seen_first(tmp_path: Path) -> None:
    scan = scanned(tmp_path)

    scan.note_faults("order", np.array([False, True, True]), "p.pages")
    scan.note_faults("order", np.array([True]), "q.pages")
    scan.note_faults("pages", 3, "p.pages")
    scan.note_faults("sums", 0, "p.pages")

    assert dict(scan.fault_counts) == {"order": 3, "pages": 3}
    assert scan.first_location_by_fault == {"order": "p.pages, record 1 of the chunk", "pages": "p.pages"}


def test_a_cut_off_file_and_exchanged_checksums_are_faults(tmp_path: Path) -> None:
    assert scanned(tmp_path, cut=True).fault_counts["pages"] == 1
    assert scanned(tmp_path, sums=False).fault_counts["sums"] == 4  # the one in the middle is its own


def test_numbers_are_read_as_a_reader_reads_them(tmp_path: Path) -> None:
    layout = Layout("topk", 2, "f2")
    user_fingerprints = np.array([1], np.uint64)
    items, scores = np.array([[3, 4]], np.uint32), np.array([[1e-12, 3e-13]], np.float32)
    dequantized_scores = dequantize(layout, encode_topk(layout, user_fingerprints, items, scores, 0), np.float64)
    assert dequantized_scores[0].tolist() == pytest.approx([1e-12, 3e-13], rel=1e-3)


def test_a_value_near_zero_may_be_rounded_at_the_size_of_its_column() -> None:
    exact = np.array([[3.0, 0.5], [1e-5, 0.5], [-2.0, 0.5]])
    rounded, another = exact.copy(), exact.copy()
    rounded[1, 0] += 1e-5
    another[1, 0] += 1e-3
    alone = exact[:, :1]

    assert _rows_equal(alone, rounded[:, :1], 1e-4, 1e-5).all()
    assert _rows_equal(alone, rounded[:, :1], 1e-4).tolist() == [True, False, True]
    assert _rows_equal(exact, rounded, 1e-4, 1e-5).all()
    assert _rows_equal(exact, another, 1e-4, 1e-5).tolist() == [True, False, True]
    # NaN fails only its own row
    exact[0, 0] = np.nan
    assert _rows_equal(exact, exact, 1e-4, 1e-5).tolist() == [False, True, True]
