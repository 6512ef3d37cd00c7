"""Encoding and decoding of fixed-size records."""

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache.errors import ConfigError, CorruptArtefact, UnfitValue
from cache.records import (
    FLAG_LIVE,
    NIGHTLY_FLAGS,
    NO_ITEM,
    Layout,
    absent_records,
    decode_record,
    encode_numbers,
    encode_topk,
    is_absent,
    pack_overlay,
    peek_fingerprint,
    peek_format,
    unfit_row_mask,
    unpack_overlay,
)

FINGERPRINTS = np.array([1, 2**64 - 1], np.uint64)
moderate = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


def test_a_list_of_100_in_half_precision_takes_616_bytes():
    assert Layout("topk", 100, "f2").size_bytes == 616


@given(hnp.arrays(np.float32, (2, 5), elements=moderate), st.sampled_from(["f2", "f4"]))
@example(np.array([[1e6, 0.00101, 0, 0, 0], [1, 2, 3, 4, 5]], np.float32), "f2")
def test_scores_come_back_within_half_precision_and_items_exactly(scores, precision):
    items = np.arange(10, dtype=np.uint32).reshape(2, 5)
    layout = Layout("topk", 8, precision)

    records = encode_topk(layout, FINGERPRINTS, items, scores, 1_700_000_000)

    for row, fingerprint in enumerate(FINGERPRINTS.tolist()):
        record = decode_record(layout, records[row].tobytes())
        assert (record.fingerprint, record.scored_at, record.is_live) == (fingerprint, 1_700_000_000, False)
        assert record.item_ordinals is not None and record.item_ordinals.tolist() == items[row].tolist()
        relative, absolute = (2**-11, 2**-39) if precision == "f2" else (0, 0)
        largest = float(np.abs(scores[row]).max())
        assert np.allclose(record.numbers, scores[row], rtol=relative, atol=absolute * largest)


@given(st.integers(-100, 100))
def test_the_shared_exponent_keeps_precision_at_any_scale(power):
    scores = np.ldexp(np.array([[3.25, 1.5, -0.75]], np.float32), power)
    layout = Layout("topk", 3, "f2")
    items = np.array([[5, 6, 7]], np.uint32)
    record = decode_record(layout, encode_topk(layout, FINGERPRINTS[:1], items, scores, 0)[0].tobytes())
    assert record.numbers.tolist() == scores[0].tolist()


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    st.integers(-60, 20),
)
def test_a_number_is_rounded_once_to_its_record_s_range(numbers, power):
    numbers = np.ldexp(numbers, power).astype(np.float32)
    assume(np.isfinite(numbers).all())
    layout = Layout("vector", numbers.shape[1], "f2")
    try:
        records = encode_numbers(layout, FINGERPRINTS[:1].repeat(len(numbers)), numbers, 0)
    except UnfitValue:
        return
    scaled = np.ldexp(numbers.astype(np.float64), -records["exponent"][:, None].astype(int))
    assert np.array_equal(records["numbers"], scaled.astype(np.float16))


def test_unused_slots_never_come_back():
    layout = Layout("topk", 4, "f2")
    items = np.array([[9, NO_ITEM, NO_ITEM]], np.uint32)
    record = decode_record(layout, encode_topk(layout, FINGERPRINTS[:1], items, np.ones((1, 3), "f4"), 0)[0].tobytes())
    assert record.item_ordinals is not None and record.item_ordinals.tolist() == [9]
    assert len(record.numbers) == 1


@pytest.mark.parametrize("non_finite", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", ["f2", "f4"])
def test_a_non_finite_number_is_refused_never_clipped(non_finite, precision):
    with pytest.raises(UnfitValue) as caught:
        encode_numbers(Layout("value", 2, precision), FINGERPRINTS[:1], np.array([[1.0, non_finite]], "f4"), 0)
    assert caught.value.details["rule"] == "non_finite"


def test_a_score_that_would_turn_zero_is_refused():
    scores = np.array([[1.0, 1e-20]], np.float32)
    with pytest.raises(UnfitValue) as caught:
        encode_topk(Layout("topk", 2, "f2"), FINGERPRINTS[:1], np.array([[1, 2]], np.uint32), scores, 0)
    assert caught.value.details["rule"] == "underflow"


@given(hnp.arrays(np.float32, (2, 6), elements=moderate))
def test_int8_vectors_keep_the_direction_within_half_a_step(vectors):
    layout = Layout("vector", 6, "i1")
    records = encode_numbers(layout, FINGERPRINTS, vectors, 0)
    for row in range(2):
        step = np.abs(vectors[row]).max() / 127
        decoded_vector = decode_record(layout, records[row].tobytes()).numbers
        assert np.abs(decoded_vector - vectors[row]).max() <= step * 0.5001


def test_a_tiny_component_of_a_vector_is_rounded_but_a_vanishing_vector_refused():
    layout = Layout("vector", 2, "f2")
    record = encode_numbers(layout, FINGERPRINTS[:1], np.array([[1.0, 1e-20]], "f4"), 0)[0]
    assert decode_record(layout, record.tobytes()).numbers.tolist() == [1.0, 0.0]
    with pytest.raises(UnfitValue):
        encode_numbers(Layout("vector", 1, "f2"), FINGERPRINTS[:1], np.array([[np.float32(1e-45)]]), 0)


def test_a_zero_vector_stays_zero():
    for precision in ("f2", "f4", "i1"):
        layout = Layout("vector", 3, precision)
        record = encode_numbers(layout, FINGERPRINTS[:1], np.zeros((1, 3), "f4"), 0)[0]
        assert decode_record(layout, record.tobytes()).numbers.tolist() == [0, 0, 0]


@given(
    st.sampled_from(["topk", "vector", "value"]),
    st.sampled_from(["f2", "f4", "i1"]),
    hnp.arrays(np.float32, (4, 3), elements=st.one_of(
        st.floats(width=32), st.sampled_from([0.0, 1.0, 1e-20, 1e-45, 3e38])
    )),
)  # fmt: skip
def test_a_row_is_unfit_where_its_record_would_be_refused(kind, precision, numbers):
    assume(precision != "i1" or kind == "vector")
    layout = Layout(kind, 3, precision)

    def is_refused(row):
        try:
            if kind == "topk":
                items = np.array([[1, 2, 3]], np.uint32)
                encode_topk(layout, FINGERPRINTS[:1], items, numbers[row : row + 1], 0)
            else:
                encode_numbers(layout, FINGERPRINTS[:1], numbers[row : row + 1], 0)
        except UnfitValue:
            return True
        return False

    assert unfit_row_mask(layout, numbers).tolist() == [is_refused(row) for row in range(4)]


def test_a_record_without_an_answer_is_no_record_to_decode():
    for kind in ("topk", "vector", "value"):
        layout = Layout(kind, 2, "f2")
        raw = absent_records(layout, FINGERPRINTS[:1], 7)[0].tobytes()
        assert is_absent(raw, int(FINGERPRINTS[0])) and not is_absent(raw, int(FINGERPRINTS[0]) ^ 1)
        assert not is_absent(b"", 0)
        with pytest.raises(CorruptArtefact):
            decode_record(layout, raw)


def test_another_format_or_length_is_corrupt():
    """The format number stands in the record."""
    layout = Layout("value", 2, "f4")
    raw = encode_numbers(layout, FINGERPRINTS[:1], np.ones((1, 2), "f4"), 0)[0].tobytes()
    assert peek_format(raw) == 1 and peek_fingerprint(raw) == 1
    with pytest.raises(CorruptArtefact):
        decode_record(layout, raw[:14] + bytes([0x20]) + raw[15:])
    with pytest.raises(CorruptArtefact):
        decode_record(layout, raw[:-1])


def test_a_count_beyond_the_width_is_corrupt():
    layout = Layout("value", 2, "f4")
    raw = encode_numbers(layout, FINGERPRINTS[:1], np.ones((1, 2), "f4"), 0)[0].tobytes()
    with pytest.raises(CorruptArtefact):
        decode_record(layout, raw[:12] + b"\xff\xff" + raw[14:])


def test_the_live_flag_travels():
    layout = Layout("value", 1, "f4")
    raw = encode_numbers(layout, FINGERPRINTS[:1], np.ones((1, 1), "f4"), 0, flags=FLAG_LIVE)[0].tobytes()
    assert decode_record(layout, raw).is_live


def test_an_overlay_is_a_record_and_the_digest_of_its_input():
    layout = Layout("value", 1, "f4")
    raw = encode_numbers(layout, FINGERPRINTS[:1], np.ones((1, 1), "f4"), 0)[0].tobytes()
    assert unpack_overlay(layout, pack_overlay(raw, b"d" * 16)) == (raw, b"d" * 16)
    assert unpack_overlay(layout, raw) is None
    with pytest.raises(ValueError):
        pack_overlay(raw, b"short")


@pytest.mark.parametrize(
    ("kind", "width", "precision"),
    [("topk", 0, "f2"), ("topk", 70_000, "f2"), ("topk", 3, "i1"), ("matrix", 3, "f2"), ("value", 3, "f8")],
)
def test_an_impossible_layout_is_refused(kind, width, precision):
    with pytest.raises(ConfigError):
        Layout(kind, width, precision)


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        (Layout("vector", 2, "f4"), np.float32("nan")),
        (Layout("value", 2, "f4"), np.float32("inf")),
        (Layout("vector", 2, "f2"), np.float16("inf")),
        (Layout("topk", 2, "f2"), np.float16("nan")),
    ],
)
def test_a_number_that_is_not_finite_is_damage_and_no_answer(layout, damage):
    record = np.zeros(1, layout.dtype)
    record["flags"], record["count"] = NIGHTLY_FLAGS, 2
    decode_record(layout, record[0].tobytes())

    record["numbers"][0, 1] = damage

    with pytest.raises(CorruptArtefact, match="not finite"):
        decode_record(layout, record[0].tobytes())


def test_decoding_with_the_size_of_the_catalogue_refuses_an_ordinal_beyond_it():
    layout = Layout("topk", 3, "f4")
    items = np.array([[4, 9]], np.uint32)
    raw = encode_topk(layout, FINGERPRINTS[:1], items, np.ones((1, 2), np.float32), 0)[0].tobytes()

    decoded_items = decode_record(layout, raw, 10).item_ordinals
    assert decoded_items is not None and decoded_items.tolist() == [4, 9]
    with pytest.raises(CorruptArtefact, match="item 9 of 9"):
        decode_record(layout, raw, 9)
