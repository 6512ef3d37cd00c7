"""Ids, their hashes, and digests of inputs."""

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import InvalidId, InvalidInput
from cache.format.ids import (
    FeatureValue,
    _encode_feature,
    canonical_id,
    fingerprint,
    fingerprints,
    hash_id,
    hash_ids,
    input_digest,
)

ids = st.binary(min_size=1, max_size=12)
values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
    st.lists(st.text(max_size=3), min_size=1, max_size=3).map(tuple),
)
inputs = st.tuples(
    st.sampled_from(["model-a", "model-b"]),
    st.none() | st.lists(ids, max_size=4),
    st.none() | st.dictionaries(st.text(max_size=3), values, max_size=3),
)


def test_integers_take_their_decimal_form_and_strings_stay_as_they_are():
    assert canonical_id(7) == b"7"
    assert canonical_id("007") == b"007"
    assert canonical_id("é/ü") == "é/ü".encode()


@pytest.mark.parametrize("value", ["", "x" * 257, "é" * 129, 1.0, True, None, b"raw", "\ud800"])
def test_anything_but_1_to_256_bytes_of_text_is_refused(value):
    with pytest.raises(InvalidId):
        canonical_id(value)


def test_an_id_of_exactly_256_bytes_is_accepted():
    assert len(canonical_id("é" * 128)) == 256


@given(st.lists(ids, max_size=20), st.integers(0, 3))
def test_hashes_of_many_are_the_hashes_of_the_single_ids(raws, seed):
    assert hash_ids(raws, seed).tolist() == [hash_id(raw, seed) for raw in raws]
    assert fingerprints(raws).tolist() == [fingerprint(raw) for raw in raws]


@given(st.lists(ids, min_size=1, max_size=50, unique=True))
def test_a_fingerprint_is_independent_of_the_directory_hash(raws):
    assert not (hash_ids(raws, 0) == fingerprints(raws)).any()


def typed(value: FeatureValue) -> object:
    if isinstance(value, float):
        return ("float", (value + 0.0).hex())
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return ("texts", value)
        return ("vector", tuple((float(component) + 0.0).hex() for component in value))
    return (type(value).__name__, value)


def meaning(model_input: Any) -> object:
    model, history, features = model_input
    named = None if features is None else {name: typed(value) for name, value in features.items()}
    return (model, history, named)


@given(inputs, inputs)
def test_different_inputs_have_different_digests_and_equal_ones_the_same(one, other):
    """Model, dtype and shape are part of the identity."""
    is_equal = meaning(one) == meaning(other)
    assert (input_digest(*one) == input_digest(*other)) == is_equal


def test_numbers_that_compare_equal_are_still_different_inputs_but_zeros_fold():
    digests = {input_digest("m", None, {"x": value}) for value in (1, 1.0, True, "1")}
    assert len(digests) == 4
    assert input_digest("m", None, {"x": 0.0}) == input_digest("m", None, {"x": -0.0})
    assert input_digest("m", None, {"x": (-0.0,)}) == input_digest("m", None, {"x": (0.0,)})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, (1.0, math.nan)])
def test_what_is_not_a_finite_number_is_refused(value):
    with pytest.raises(InvalidInput):
        input_digest("m", None, {"x": value})


def test_an_empty_history_is_not_a_missing_one_and_order_matters():
    assert input_digest("m", [], None) != input_digest("m", None, None)
    assert input_digest("m", [b"a", b"b"], None) != input_digest("m", [b"b", b"a"], None)
    assert input_digest("m", [b"ab"], None) != input_digest("m", [b"a", b"b"], None)


@given(value=st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)))
def test_a_vector_is_digested_number_by_number(value: list[float]) -> None:
    """Stored overlays carry these digests: at once or one by one, the bytes are the same."""
    packed = b"".join(struct.pack("<d", float(number) + 0.0) for number in value)

    assert _encode_feature("x", tuple(value)) == b"v" + struct.pack("<I", len(packed)) + packed
