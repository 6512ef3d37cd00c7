"""Tables of features: their rows go by ids, and a table that hides its ids is refused."""

import pyarrow as pa
import pytest

from cache.config.night import Sources
from cache.errors import SourceError
from precompute.adapters.inputs import feature_columns

IDS = pa.array([f"i{row}" for row in range(6)])
SHUFFLED = [f"i{row}" for row in (3, 1, 5, 0, 4, 2)]


@pytest.mark.parametrize("name", ["item_id", "id", "sku"])
def test_a_table_whose_ids_have_another_name_and_order_is_refused(name: str) -> None:
    table = pa.table({name: SHUFFLED, "price": [3.0, 1.0, 5.0, 0.0, 4.0, 2.0]})

    with pytest.raises(SourceError, match=f"no column 'item', but {name!r} holds item ids: rename"):
        feature_columns(table, IDS, "item")


def test_ids_that_are_whole_numbers_are_found_as_well() -> None:
    table = pa.table({"user_id": [3, 1, 2], "age": [30, 10, 20]})

    with pytest.raises(SourceError, match="'user_id' holds user ids: rename"):
        feature_columns(table, pa.array(["1", "2", "3"]), "user")


def test_a_table_that_mostly_has_these_ids_is_refused_too() -> None:
    table = pa.table({"item_id": ["x", "i4", "i3", "i2", "i1", "i0"], "price": [0.0] * 6})

    with pytest.raises(SourceError, match="'item_id' holds item ids"):
        feature_columns(table, IDS, "item")


def test_rows_in_the_order_of_the_ids_need_no_column_of_them() -> None:
    table_without_ids = pa.table({"price": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "level": [0, 1, 0, 1, 0, 1]})
    named = table_without_ids.append_column("item_id", IDS)

    assert list(feature_columns(table_without_ids, IDS, "item").column_by_name) == ["price", "level"]
    assert feature_columns(named, IDS, "item").column_by_name["price"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("id_column", ["sku", "item"])
def test_the_column_of_ids_may_have_the_name_that_it_has_in_the_clicks(id_column: str) -> None:
    table = pa.table({id_column: SHUFFLED, "price": [3.0, 1.0, 5.0, 0.0, 4.0, 2.0]})

    column_by_name, _ = feature_columns(table, IDS, "item", Sources(interactions=("clicks.csv",), item_column="sku"))

    assert list(column_by_name) == ["price"] and column_by_name["price"].tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_of_other_ids_are_left_out_and_counted() -> None:
    table = pa.table({"item": ["x0", *SHUFFLED, "x1"], "price": [9.0, 3.0, 1.0, 5.0, 0.0, 4.0, 2.0, 9.0]})

    column_by_name, (limit_text,) = feature_columns(table, IDS, "item")

    assert column_by_name["price"].tolist() == [0, 1, 2, 3, 4, 5]
    assert limit_text.startswith("take in 2 rows of item_features, of items that are not in item_ids ('x0' first)")
    assert feature_columns(table, None, "item").limit_texts == ()
