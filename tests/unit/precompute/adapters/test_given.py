"""Wrong ids, vectors and clicks: each ends in one line that names the remedy, and nothing is written."""

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from cache.config.night import Sources
from cache.errors import SourceError
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids
from precompute.adapters.vectors import from_vectors
from precompute.config.settings import night_config
from precompute.sources.readers import read_interactions
from tests.unit.precompute.adapters.written import taste_clicks

CLICKS = taste_clicks()
LEFT_VECTORS, VALUES, RIGHT = np.linalg.svd(CLICKS.toarray(), full_matrices=False)
USERS = (LEFT_VECTORS[:, :6] * VALUES[:6]).astype(np.float32)
ITEMS = np.ascontiguousarray(RIGHT[:6].T)


def with_infinity():
    rows = ITEMS.copy()
    rows[3, 2] = -np.inf
    return rows


def saved(path, rows):
    np.save(path, rows)
    return path


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


WRONG = {
    "infinite": (with_infinity(), "not finite"),
    "float64 beyond float32": (ITEMS.astype("f8") * 1e39, "not finite"),
    "integers of one column": (np.arange(80), r"a row for each item, not int64 \[80\]"),
    "texts": (np.full((80, 6), "1.0"), "real numbers are needed"),
    "complex": (ITEMS.astype(np.complex64), "real numbers are needed"),
    "objects": (np.full((80, 6), None), "a matrix of numbers"),
    "ragged lists": ([[1.0, 2.0], [1.0]], "all rows need the same length"),
    "empty": (np.empty((0, 6), np.float32), r"not float32 \[0, 6\]"),
    "no dimensions": (np.empty((80, 0), np.float32), "a matrix of numbers"),
}


@pytest.mark.parametrize(("rows", "message_pattern"), WRONG.values(), ids=WRONG)
def test_wrong_vectors(rows, message_pattern):
    with pytest.raises(SourceError, match=message_pattern) as error:
        EntityVectors.of(None, rows, "item")

    assert "\n" not in error.value.message


IDS = {
    "twice as text and number": (["7", "8", "7"], "'7' is repeated in row"),
    "of two kinds": (["a", 1], "texts or integers, all of the same type"),
    "numbers with a point": ([1.5, 2.5], "'item' is double; ids are strings or integers"),
    "missing": (["a", None], "item ids: .*row 1"),
    "an empty text": (["a", ""], "item ids: .*row 1"),
    "too long": (["a", "b" * 257], "item ids: .*row 1"),
    "none": ([], "there are no item ids: give at least one"),
    "one number": (7, "texts or integers"),
}


@pytest.mark.parametrize(("ids", "message_pattern"), IDS.values(), ids=IDS)
def test_wrong_ids(ids, message_pattern):
    with pytest.raises(SourceError, match=message_pattern) as error:
        checked_ids(ids, "item")

    assert "\n" not in error.value.message


def test_ids_of_a_file(tmp_path):
    (tmp_path / "ids").write_text("a\nb\n", encoding="utf-8")

    assert checked_ids(tmp_path / "ids", "item").to_pylist() == ["a", "b"]
    (tmp_path / "ids").write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match="one id a line, in UTF-8"):
        checked_ids(tmp_path / "ids", "item")
    with pytest.raises(SourceError, match="one id a line, in UTF-8"):
        checked_ids(tmp_path / "none", "item")


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_only_line_breaks_end_an_id_of_a_file(tmp_path, line_break):
    """`str.splitlines` ends lines at eight more signs, and a byte order mark is part of no id."""
    ids = ["a", *(f"b{sign}c" for sign in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"), "d"]
    text = "\ufeff" + line_break.join([*ids[:-1], f" {ids[-1]} "]) + line_break
    (tmp_path / "ids").write_bytes(text.encode())

    assert checked_ids(tmp_path / "ids", "item").to_pylist() == ids


@pytest.mark.parametrize("null_text", ["NULL", "\\N", "nan"])
def test_a_word_for_nothing_among_the_ids_of_a_file_is_refused(tmp_path, null_text):
    (tmp_path / "ids").write_text(f"a\n{null_text}\n")

    with pytest.raises(SourceError, match=r"item ids: .*no id, first in row 1 .*fill them in"):
        checked_ids(tmp_path / "ids", "item")


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.decimal128(38, 0)])
def test_ids_of_other_types_are_texts(kind):
    assert checked_ids(pa.array(["7", "8"]).cast(kind), "item").to_pylist() == ["7", "8"]


@pytest.mark.parametrize("rows", [[[1.0, 2.0], [1.0, None]], [[1, 2], [None, 1]]])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_number_that_is_missing_is_named_by_its_row(rows, is_chunked):
    column = pa.array(rows)
    with pytest.raises(SourceError, match="a number is missing in item vectors, first in row 1"):
        EntityVectors.of(None, pa.chunked_array([column]) if is_chunked else column, "item")


@pytest.mark.parametrize(
    "ids", [range(3), np.arange(3), np.arange(3).astype("i4"), ["0", "1", "2"], pa.array([0, 1, 2])]
)
def test_ids_of_every_kind_are_texts(ids):
    assert checked_ids(ids, "item").to_pylist() == ["0", "1", "2"]


@pytest.mark.parametrize("rows", [ITEMS, ITEMS.astype("f8"), ITEMS.tolist(), np.asfortranarray(ITEMS)])
def test_vectors_of_every_kind_are_the_same(rows):
    vectors = EntityVectors.of(None, rows, "item")

    assert np.array_equal(vectors.vectors, ITEMS) and vectors.vectors.dtype == np.float32


class TestFiles:
    def test_one_that_is_not_there(self, tmp_path):
        for name in ("items.npy", "items.parquet"):
            with pytest.raises(SourceError, match=r"item vectors: there is no file .*items"):
                EntityVectors.of(None, tmp_path / name, "item")

    def test_one_of_another_kind(self, tmp_path):
        with pytest.raises(SourceError, match=r"give a \.npy or a \.parquet file"):
            EntityVectors.of(None, tmp_path / "items.csv", "item")

    @pytest.mark.parametrize("name", ["items.npy", "items.parquet"])
    def test_one_that_is_cut_short(self, tmp_path, name):
        saved(tmp_path / "items.npy", ITEMS)
        parquet(tmp_path / "items.parquet", vector=ITEMS.tolist())
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:100])

        with pytest.raises(SourceError, match=re.escape(str(path))) as error:
            EntityVectors.of(None, path, "item")

        assert "\n" not in error.value.message

    def test_lists_of_several_lengths(self, tmp_path):
        path = parquet(tmp_path / "items.parquet", id=["a", "b"], vector=[[1.0, 2.0], [1.0]])

        with pytest.raises(SourceError, match="all rows need the same length, without missing numbers"):
            EntityVectors.of(None, path, "item")

    @pytest.mark.parametrize("incomplete_vector", [None, [1.0, None]])
    def test_a_missing_vector_or_number(self, tmp_path, incomplete_vector):
        path = parquet(tmp_path / "items.parquet", id=["a", "b"], vector=[[1.0, 2.0], incomplete_vector])

        with pytest.raises(SourceError, match=r"missing|not finite"):
            EntityVectors.of(None, path, "item")

    def test_two_columns_of_one_name(self, tmp_path):
        path = tmp_path / "items.parquet"
        pq.write_table(pa.table([["a"], [[1.0]], [[1.0]]], ["id", "vector", "vector"]), path)

        with pytest.raises(SourceError, match="two columns with the same name among id, vector, vector"):
            EntityVectors.of(None, path, "item")

    def test_columns_that_do_not_say_which_is_which(self, tmp_path):
        path = parquet(tmp_path / "items.parquet", a=[1], b=[2], vector=[[1.0]])

        with pytest.raises(SourceError, match="has the columns a, b, vector: one of ids and one of"):
            EntityVectors.of(None, path, "item")

    def test_what_is_right_is_read(self, tmp_path):
        names = [f"i{n}" for n in range(80)]
        path = parquet(tmp_path / "items.parquet", id=names, vector=ITEMS.tolist())

        assert EntityVectors.of(None, path, "item").entity_ids.to_pylist() == names
        assert np.array_equal(EntityVectors.of(None, path, "item").vectors, ITEMS)
        assert EntityVectors.of(range(80), path, "item").entity_ids[79].as_py() == "79"
        npy = saved(tmp_path / "items.npy", ITEMS)
        assert np.array_equal(EntityVectors.of(None, str(npy), "item").vectors, ITEMS)


class TestClicks:
    USERS = checked_ids(range(120), "user")
    ITEMS = checked_ids(range(80), "item")

    def test_transposed_ones(self):
        with pytest.raises(SourceError, match=r"80 by 120, .*it is items by users, give its transpos"):
            ClickMatrix.of(CLICKS.T, self.USERS, self.ITEMS)

    def test_those_of_fewer_items(self):
        with pytest.raises(SourceError, match=r"120 by 79, there are 120 users and 80 items: give a row for each"):
            ClickMatrix.of(CLICKS[:, :79], self.USERS, self.ITEMS)

    @pytest.mark.parametrize("clicks", [CLICKS.toarray(), [[1]], None])
    def test_what_is_no_sparse_matrix(self, clicks):
        with pytest.raises(SourceError, match="clicks must be a scipy sparse matrix, users by items"):
            ClickMatrix.of(clicks, self.USERS, self.ITEMS)

    def test_weights_that_are_not_finite(self):
        invalid_clicks = CLICKS.copy()
        invalid_clicks.data[0] = np.nan

        with pytest.raises(SourceError, match="not finite: leave these clicks out"):
            ClickMatrix.of(invalid_clicks, self.USERS, self.ITEMS)

    def test_dislikes_and_zeros_are_left_out_and_the_callers_matrix_is_as_it_was(self):
        clicks = CLICKS.copy()
        clicks.data[:3] = -1, 0, 5

        click_matrix = ClickMatrix.of(clicks, self.USERS, self.ITEMS)

        assert click_matrix.matrix.nnz == CLICKS.nnz - 2 and click_matrix.matrix.data.max() == 5
        assert clicks.data[:3].tolist() == [-1, 0, 5]

    def test_pairs_that_come_twice_are_added(self):
        twice = sp.coo_matrix((np.ones(2), ([0, 0], [1, 1])), (120, 80))

        assert ClickMatrix.of(twice, self.USERS, self.ITEMS).matrix[0, 1] == 2

    def test_a_file_that_scipy_did_not_write(self, tmp_path):
        np.savez(tmp_path / "clicks.npz", a=np.zeros(3))

        with pytest.raises(SourceError, match=r"write it with scipy.sparse.save_npz"):
            ClickMatrix.of(tmp_path / "clicks.npz", self.USERS, self.ITEMS)
        with pytest.raises(SourceError, match=r"write it with scipy.sparse.save_npz"):
            ClickMatrix.of(tmp_path / "none.npz", self.USERS, self.ITEMS)

    def test_a_table_of_others(self, tmp_path):
        path = parquet(tmp_path / "clicks.parquet", user=["x", "y"], item=["x", "y"])

        with pytest.raises(SourceError, match="no click has both a known user and a known item"):
            ClickMatrix.of(path, self.USERS, self.ITEMS)

    def test_a_table_with_ids_for_rows_that_were_given_none(self, tmp_path):
        path = parquet(tmp_path / "clicks.parquet", user=["anna"], item=["hat"])
        rows = [pa.array([str(row) for row in range(9)])] * 2

        with pytest.raises(SourceError) as error:
            ClickMatrix.of(path, *rows)

        assert "give user_ids (--user-ids) and item_ids (--item-ids)" in error.value.message

    def test_a_table_with_other_columns(self, tmp_path):
        path = parquet(tmp_path / "clicks.parquet", user_id=["x"], item=["y"])

        with pytest.raises(SourceError) as error:
            ClickMatrix.of(path, self.USERS, self.ITEMS)
        assert error.value.message.endswith(
            "clicks.parquet has no column 'user'; it has user_id, item: name it by user_column"
        )

    def test_a_table_whose_columns_are_named(self, tmp_path):
        users, items = (ids.to_pylist()[0] for ids in (self.USERS, self.ITEMS))
        path = parquet(tmp_path / "clicks.parquet", account=[users], sku=[items])

        named = Sources(interactions=(str(path),), user_column="account", item_column="sku")
        assert ClickMatrix.of(named, self.USERS, self.ITEMS).matrix.nnz == 1

    @pytest.mark.parametrize("more", [{}, {"ts": [2, 1]}, {"timestamp": [2, 1]}])
    def test_only_times_that_are_called_so_put_clicks_in_order(self, tmp_path, more):
        users, items = (ids.to_pylist()[0] for ids in (self.USERS, self.ITEMS))
        path = parquet(tmp_path / "c.parquet", user=[users] * 2, item=[items, self.ITEMS[1].as_py()], **more)

        assert ClickMatrix.of(path, self.USERS, self.ITEMS).is_time_ordered == ("timestamp" in more)

    def test_a_table_is_the_same_as_its_matrix(self, tmp_path):
        ClickMatrix.of(CLICKS, self.USERS, self.ITEMS).write(tmp_path / "clicks.parquet", self.ITEMS)

        click_matrix = ClickMatrix.of(tmp_path / "clicks.parquet", self.USERS, self.ITEMS)

        assert (click_matrix.matrix != CLICKS).nnz == 0

    def test_times_are_written_and_read_again(self, tmp_path):
        users, items = (ids.to_pylist()[:2] for ids in (self.USERS, self.ITEMS))
        path = parquet(
            tmp_path / "c.parquet", user=[users[1], *[users[0]] * 2], item=[items[0], items[1], items[0]],
            timestamp=[30.5, 20.0, 10.0],
        )  # fmt: skip
        ClickMatrix.of(path, self.USERS, self.ITEMS).write(tmp_path / "again.parquet", self.ITEMS)

        again = ClickMatrix.of(tmp_path / "again.parquet", self.USERS, self.ITEMS)

        assert again.matrix.indices.tolist() == [0, 1, 0]
        assert again.click_times is not None
        assert again.click_times.tolist() == [10_000_000, 20_000_000, 30_500_000]

    @pytest.mark.parametrize(
        ("users", "items", "message_pattern"),
        [
            (["u"], ["0012"], "the item '0012' of the clicks is '12' among the item ids"),
            (["07"], ["13"], "the user '07' of the clicks is '7' among the user ids"),
        ],
    )
    def test_ids_that_differ_by_leading_zeros_alone_are_named(self, users, items, message_pattern, tmp_path):
        path = parquet(tmp_path / "clicks.parquet", user=users, item=items)

        with pytest.raises(SourceError, match=f"{message_pattern}: leading zeros are part of an id"):
            ClickMatrix.of(path, pa.array(["7", "u"]), pa.array(["12", "14"]))


class TestTogether:
    def test_items_in_another_order_are_doubted_where_users_have_no_vectors(self, tmp_path):
        ids = [f"i{item}" for item in range(80)]
        pairs = CLICKS.tocoo()
        clicks = parquet(
            tmp_path / "clicks.parquet", user=[f"u{row}" for row in pairs.row],
            item=[ids[column] for column in pairs.col],
        )  # fmt: skip

        right, shuffled = (
            from_vectors(names, ITEMS, to=tmp_path / name, clicks=clicks)
            for name, names in (("right", ids), ("shuffled", np.random.default_rng(3).permutation(ids).tolist()))
        )

        assert not any("by chance" in limit or "order" in limit for limit in right.cannot)
        assert any("better than by chance" in limit for limit in shuffled.cannot)

    def test_columns_of_clicks_keep_their_names_for_the_next_days_file(self, tmp_path):
        # Given clicks with column names of their own
        users, items = [f"u{user}" for user in range(120)], [f"i{item}" for item in range(80)]
        pairs = CLICKS.tocoo()
        clicks = parquet(
            tmp_path / "clicks.parquet", customer=[users[row] for row in pairs.row],
            sku=[items[column] for column in pairs.col], at=np.arange(1, 1 + CLICKS.nnz) * 1_000_000,
        )  # fmt: skip
        sources = Sources(interactions=(str(clicks),), user_column="customer", item_column="sku", timestamp_column="at")

        # When they are imported twice
        for _ in range(2):
            from_vectors(items, ITEMS, users, USERS, to=tmp_path / "out", clicks=sources)

        # Then settings and files have the same names, and the given file can be read together with them
        written = night_config(str(tmp_path / "out/larder.toml"), {}).sources
        assert (written.user_column, written.item_column) == ("customer", "sku")
        assert written.timestamp_column == "at"
        names = pq.read_schema(tmp_path / "out/clicks.parquet").names
        assert names == ["customer", "sku", "at"]
        assert pq.read_schema(tmp_path / "out/user_vectors.parquet").names == ["customer", "vector"]
        both = replace(written, interactions=("clicks.parquet", str(clicks)))
        assert sum(len(batch.times_us) for batch in read_interactions(both, tmp_path / "out")) > CLICKS.nnz

    def test_an_unknown_metric(self, tmp_path):
        with pytest.raises(SourceError, match="metric must be inner_product or cosine, not 'l2'"):
            from_vectors(None, ITEMS, to=tmp_path / "out", metric="l2")  # type: ignore[arg-type]

    def test_what_belongs_together_is_written(self, tmp_path):
        report = from_vectors(None, ITEMS, None, USERS, to=tmp_path / "out", clicks=CLICKS)

        assert (report.users, report.items, report.clicks) == (120, 80, CLICKS.nnz)

    def test_vectors_of_users_are_enough_for_a_night_and_its_limits_are_reported(self, tmp_path):
        report = from_vectors(None, ITEMS, None, USERS, to=tmp_path / "out")

        assert (report.users, report.clicks, report.fold_in) == (120, 0, "mean")
        assert [limitation for limitation in report.cannot if "there are no clicks" in limitation]
        assert not [limitation for limitation in report.cannot if "have a night yet" in limitation]
        sources = night_config(str(tmp_path / "out/larder.toml"), {}).sources
        assert sources.names_users and not sources.interactions

    def test_items_alone_are_not(self, tmp_path):
        report = from_vectors(None, ITEMS, to=tmp_path / "out")

        assert [limitation for limitation in report.cannot if limitation.startswith("have a night yet: ")]
        assert not night_config(str(tmp_path / "out/larder.toml"), {}).sources.names_users
