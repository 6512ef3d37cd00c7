"""A bundle made of a table of vectors: the same of the same tables, and nothing of what it must not hold."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from precompute.adapters import vector_bundle
from precompute.adapters.vector_bundle import make_vector_bundle
from precompute.adapters.vectors import fold_vectors_model
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import bundle_made_of, bundles_from_tables, remove_bundles_with_items
from precompute.config.settings import NightConfig, Sources
from precompute.sources.erasures import ErasedEntities
from tests.unit.precompute.adapters.written import item_vectors

USERS, ITEMS, DIMS = 40, 60, 6
DAY = datetime(2026, 1, 30, tzinfo=UTC)

Floats = NDArray[np.float32]


@pytest.fixture
def items() -> Floats:
    return np.random.default_rng(1).normal(size=(ITEMS, DIMS)).astype(np.float32)


@pytest.fixture
def users() -> Floats:
    return np.random.default_rng(2).normal(size=(USERS, DIMS)).astype(np.float32)


def write(path: Path, name: str, ids: Any, rows: Any) -> None:
    lists = pa.array([None if row is None else list(map(float, row)) for row in rows])
    pq.write_table(pa.table({name: ids, "vector": lists}), path)


@pytest.fixture
def config(tmp_path: Path, items: Floats, users: Floats) -> NightConfig:
    write(tmp_path / "items.parquet", "item", [f"i{row}" for row in range(ITEMS)], items)
    write(tmp_path / "users.parquet", "user", [f"u{row}" for row in range(USERS)], users)
    sources = Sources(user_vectors="users.parquet", item_vectors="items.parquet")
    return NightConfig(base=str(tmp_path), sources=sources)


def with_clicks(config: NightConfig, users: Floats, items: Floats, at: datetime) -> NightConfig:
    """What each user likes best, at this time."""
    liked = np.argsort(-(users @ items.T), axis=1)[:, :10]
    table = {
        "user": [f"u{user}" for user in range(USERS) for _ in range(10)],
        "item": [f"i{item}" for item in liked.ravel()],
        "timestamp": pa.array([at] * liked.size, pa.timestamp("us", tz="UTC")),
    }
    pq.write_table(pa.table(table), config.path("clicks.parquet"))
    return replace(config, sources=replace(config.sources, interactions=("clicks.parquet",)))


def make_bundle_of(config: NightConfig, folder: str = "bundle", **more: Any) -> Bundle:
    return make_vector_bundle(config, config.path(folder), **{"interactions_before": None, **more})


def test_the_same_tables_make_the_same_bytes_and_other_items_others(
    config: NightConfig, items: Floats, users: Floats
) -> None:
    config = with_clicks(config, users, items, DAY)

    first, repeated_bundle = make_bundle_of(config, "a/bundle"), make_bundle_of(config, "b/bundle")
    write(config.path("items.parquet"), "item", [f"i{row}" for row in range(ITEMS)], items[::-1])
    other_bundle = make_bundle_of(replace(config, sources=replace(config.sources, interactions=())), "c/bundle")

    assert np.array_equal(item_vectors(first.path.parent), items)
    for file in first.path.iterdir():
        assert file.read_bytes() == (repeated_bundle.path / file.name).read_bytes()
    assert first.digest == repeated_bundle.digest != other_bundle.digest


def test_other_vectors_of_users_alone_are_the_same_model(config: NightConfig, users: Floats) -> None:
    original_bundle = make_bundle_of(config, "before")
    write(config.path("users.parquet"), "user", [f"u{row}" for row in range(USERS)], users + 1)

    assert make_bundle_of(config, "after").digest == original_bundle.digest


def test_the_fold_is_chosen_by_what_users_did_before_the_cut(
    config: NightConfig, items: Floats, users: Floats, tmp_path: Path
) -> None:
    config = with_clicks(config, users, items, DAY)
    alone = replace(config, sources=replace(config.sources, user_vectors=None))

    def recalls(config: NightConfig, folder: str, interactions_before: datetime | None) -> Any:
        make_bundle_of(config, folder, interactions_before=interactions_before)
        text = (tmp_path / folder / "bundle.json").read_text()
        return orjson.loads(text)["training"]["recalls"]

    recall_by_fold = recalls(config, "after", None)
    assert recall_by_fold.keys() == {"mean", "ridge 0.1", "ridge 1", "ridge 10"}
    assert recalls(config, "before", DAY) == {}
    assert recalls(alone, "alone", None).keys() == recall_by_fold.keys()


def test_a_fold_is_chosen_by_few_users_of_many(
    config: NightConfig, items: Floats, users: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_clicks(config, users, items, DAY)
    sample_sizes: list[int] = []
    monkeypatch.setattr(vector_bundle, "FOLD_USERS_MAX", 7)

    def record_sizes(items: Any, users: Any, clicks: Any, **more: Any) -> Any:
        sample_sizes.extend((len(users.entity_ids), clicks.matrix.shape[0], clicks.matrix.nnz))
        return fold_vectors_model(items, users, clicks, **more)

    monkeypatch.setattr(vector_bundle, "fold_vectors_model", record_sizes)
    make_bundle_of(config)

    assert sample_sizes == [7, 7, 70]


def remarks_of(bundle: Bundle) -> list[str]:
    remarks: list[str] = bundle.training.get("remarks", [])
    return remarks


def test_clicks_that_vectors_do_not_explain_are_a_remark_and_no_end(
    config: NightConfig, users: Floats, items: Floats
) -> None:
    """What is only to be left out of lists may be what nobody would choose again."""
    odd = make_bundle_of(with_clicks(config, -users, items, DAY), "odd")

    (remark,) = remarks_of(odd)
    assert "as by chance" in remark and "only to be left out" in remark
    assert remarks_of(make_bundle_of(with_clicks(config, users, items, DAY), "usual")) == []


def test_of_one_click_nothing_is_judged(config: NightConfig, users: Floats, items: Floats) -> None:
    """On a first night it was of an item ranked 40th, below a random one: 0 % of pairs."""
    config = with_clicks(config, -users, items, DAY)
    table = pq.read_table(config.path("clicks.parquet"))
    pq.write_table(table.slice(0, 1), config.path("clicks.parquet"))

    assert remarks_of(make_bundle_of(config)) == []


def test_clicks_of_strangers_alone_choose_no_fold_and_end_no_night(
    config: NightConfig, users: Floats, items: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_clicks(config, users, items, DAY)
    table = pq.read_table(config.path("clicks.parquet"))
    strangers = pa.array([f"new-{row}" for row in range(len(table))])
    pq.write_table(table.set_column(0, "user", strangers), config.path("clicks.parquet"))

    (remark,) = remarks_of(make_bundle_of(config, "everybody"))
    monkeypatch.setattr(vector_bundle, "FOLD_USERS_MAX", 7)

    assert "no click has both a known user and a known item" in remark
    assert remarks_of(make_bundle_of(config, "sample")) == []


def test_what_is_erased_is_in_no_bundle(config: NightConfig) -> None:
    erased = ErasedEntities(frozenset(), frozenset({b"i7"}), (1,))

    bundle = make_bundle_of(config, erased=erased)

    assert len(bundle.vocabulary) == ITEMS - 1
    assert b"i7" not in bundle.item_ids and b"i8" in bundle.item_ids


WRONG = {
    "twice": (["i0", "i1", "i0"], [[1.0, 2], [2, 3], [3, 4]], "'i0' is repeated in row"),
    "no number": (["i0", "i1"], [[1.0, float("nan")], [2, 3]], r"1 item vectors are not finite"),
    "widths": (["i0", "i1"], [[1.0, 2], [2]], "all rows need the same length"),
    "missing": (["i0", "i1"], [[1.0, 2], None], "without missing numbers"),
    "no id": (["i0", None], [[1.0, 2], [3, 4]], "1 rows have no usable id"),
    "empty": (pa.array([], pa.string()), [], "no rows: it names no item|there are no item ids"),
    "dims": (["i0", "i1"], [[1.0, 2], [2, 3]], "no user has a vector of 2 finite numbers, the length"),
}


@pytest.mark.parametrize(("ids", "rows", "message_pattern"), WRONG.values(), ids=WRONG)
def test_a_table_that_makes_no_bundle_is_refused_in_one_line(
    config: NightConfig, ids: Any, rows: Any, message_pattern: str
) -> None:
    if rows:
        write(config.path("items.parquet"), "item", ids, rows)
    else:
        column = pa.array([], pa.list_(pa.float64()))
        pq.write_table(pa.table({"item": ids, "vector": column}), config.path("items.parquet"))

    with pytest.raises(SourceError, match=message_pattern) as error:
        make_bundle_of(config)

    assert "\n" not in error.value.message
    assert "items.parquet" in error.value.message


def test_columns_have_the_names_that_are_configured(config: NightConfig, items: Floats) -> None:
    table = {"sku": [f"i{row}" for row in range(ITEMS)], "embedding": list(items), "price": 1.0}
    pq.write_table(pa.table({**table, "price": np.ones(ITEMS)}), config.path("items.parquet"))
    sources = replace(
        config.sources, item_column="sku", vector_column="embedding", user_vectors=None,
        interactions=(),
    )  # fmt: skip

    bundle = make_bundle_of(replace(config, sources=replace(sources, vector_metric="cosine")))

    assert (len(bundle.vocabulary), bundle.metric) == (ITEMS, "cosine")


def test_a_bundle_that_is_named_together_with_a_table_of_items_is_refused(config: NightConfig) -> None:
    with pytest.raises(ConfigError, match=r"bundle \(mine\) and sources.item_vectors .* both set"):
        replace(config, bundle="mine")


def test_a_vector_of_an_event_is_in_the_bundle_unless_it_would_not_fit_the_tables(
    config: NightConfig, items: Floats
) -> None:
    good = {b"new": [2.0] * DIMS, b"longest": [-65_504.0] * DIMS}
    invalid_vectors = {b"huge": [65_600.0] + [0.0] * (DIMS - 1), b"end": [-3e38] * DIMS, b"short": [1.0]}

    first, mixed_bundle = (
        make_bundle_of(config, "a", event_vectors=good),
        make_bundle_of(config, "b", event_vectors={**good, **invalid_vectors}),
    )

    assert first.digest == mixed_bundle.digest and len(mixed_bundle.vocabulary) == ITEMS + 2
    # A table with longer vectors accepts longer ones.
    write(config.path("items.parquet"), "item", [f"i{row}" for row in range(ITEMS)], 1e5 * items)
    assert {*make_bundle_of(config, "c", event_vectors={**good, **invalid_vectors}).item_ids} >= {
        b"new",
        b"longest",
        b"huge",
    }


def test_an_item_that_is_erased_takes_bundles_with_it_from_the_store(config: NightConfig) -> None:
    store, digests = config.store(), {}
    vectors: dict[str, dict[bytes, list[float]]] = {
        "without": {},
        "with": {b"new": [0.25] * DIMS},
        "damaged": {b"other": [2.0] * DIMS},
    }
    for name, event_vectors in vectors.items():
        key = hashlib.sha256(name.encode()).hexdigest()
        make = partial(make_vector_bundle, config, interactions_before=None, event_vectors=event_vectors)
        with bundle_made_of(store, key, make) as bundle:
            digests[name] = bundle.digest
    store.local(f"bundles/{digests['damaged']}/items.parquet").write_bytes(b"{")

    assert remove_bundles_with_items(store, []) == 0
    assert remove_bundles_with_items(store, [b"nobody", b"new"]) == 2

    assert [bundle_record.bundle_digest for bundle_record in bundles_from_tables(store)] == [digests["without"]]
    files = [file for file in store.local("bundles").rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} == {"bundles", digests["without"]}
    assert not any(np.full(DIMS, 0.25, "f4").tobytes() in file.read_bytes() for file in files)
    assert remove_bundles_with_items(store, [b"nobody", b"new"]) == 0
