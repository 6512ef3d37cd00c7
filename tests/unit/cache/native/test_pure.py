"""Functions without what is compiled: each is there, and ids of a catalogue are found whatever their length."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.format.item_table import IdBytes
from cache.native import loader, pure
from cache.records import Layout


def test_every_function_is_compiled_too() -> None:
    names = {
        name
        for name, member in vars(pure).items()
        if not name.startswith("_") and getattr(member, "__module__", "") == pure.__name__
    }

    assert len(names) >= 15 and names <= vars(loader.load_kernels({})).keys()


@settings(deadline=None)
@given(names=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=30), data=st.data())
@example(names=["x" * 90, "y"], data=None)
def test_names_are_the_bytes_of_the_ids_whatever_their_length(names: list[str], data: st.DataObject | None) -> None:
    raws = [name.encode() for name in names]
    lent = np.frombuffer(b"".join(raws), np.uint8), np.cumsum([0, *map(len, raws)]).astype("<u8")
    row = st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=2)
    rows = [[0, 1], [1, 1]] if data is None else data.draw(st.lists(row, min_size=1, max_size=4))
    records = np.zeros(len(rows), Layout("topk", 3, "f2").dtype)
    records["items"][:, :2] = rows

    named = IdBytes(*pure.names(records, 3, True, 2, *lent), 2)

    cuts = np.frombuffer(named.offset_bytes, np.int32).tolist()
    assert [named.joined_ids[a:b] for a, b in pairwise(cuts)] == [raws[ordinal] for row in rows for ordinal in row]
    assert cuts[-1] == len(named.joined_ids)
    assert named.id_sizes.tolist() == [[len(raws[ordinal]) for ordinal in row] for row in rows]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.sampled_from([1, 5, 40, 200]))
def test_products_with_rows_are_those_of_numpy_up_to_rounding(seed: int, dims: int, chosen: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, vector = (rng.standard_normal((90, dims)).astype("f4"), rng.standard_normal(dims).astype("f4"))
    ordinals = rng.integers(0, 90, chosen)

    for kernels in (pure, loader.load_kernels({})):
        products = np.frombuffer(kernels.dots(vector, matrix, ordinals), np.float32)

        expected_products = matrix[ordinals].astype(np.float64) @ vector
        bound = dims * 2.0**-23 * np.abs(matrix[ordinals]).astype(np.float64) @ np.abs(vector)
        assert (np.abs(products - expected_products) <= bound + 1e-30).all()
        for wrong in ([90], [0, -1]):
            with pytest.raises(ValueError, match="the matrix does not have"):
                kernels.dots(vector, matrix, np.array(wrong))


@pytest.mark.parametrize("offsets", [[0, 1, 9], [0, 2, 1], [0], [2**63, 2**64 - 1]])
def test_a_catalogue_that_ends_early_is_no_catalogue(offsets: list[int]) -> None:
    record = np.zeros(1, Layout("topk", 2, "f2").dtype)
    record["items"] = [[1, 0]] if len(offsets) == 3 else [[0, 0]]

    with pytest.raises(ValueError, match="the catalogue does not have"):
        pure.names(record, 2, True, 2, b"ab", np.array(offsets, np.uint64))
