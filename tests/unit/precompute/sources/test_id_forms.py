"""Ids that are probably one id in several forms are found among any number of others, in bounded memory."""

import numpy as np
import pyarrow as pa
import pytest

from precompute.sources.id_forms import IdForms, fold_ids


def remark_of(forms, hidden=()):
    """The remark and the ids that it names, where there is one."""
    remark = forms.remark(hidden)
    assert remark is not None
    return remark


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["U7", "u 7", "u7\u200b", "\u00a0u7", "'u7'", '="u7"'], "u7"),
        (["007", "+7", "7.0", "7,0", "7.00"], "7"),
        (["00", "+0", "0.0"], "0"),
        (["1,007", "01007"], "1007"),
        (["1,234,567"], "1234567"),
        (["\uff57\uff17"], "w7"),
        (["CAF\u00c9", "cafe\u0301"], "caf\u00e9"),
    ],
)
def test_forms_of_one_id_fold_to_the_same(texts, form):
    rows, forms = fold_ids(pa.array([*texts, form]))

    assert rows.tolist() == list(range(len(texts))) and {*forms.to_pylist()} == {form}


@pytest.mark.parametrize("text", ["u007", "1,000,5", "1.5", "a.0", "-7", "x", "\u4e2d", "0", "10"])
def test_other_ids_fold_to_themselves(text):
    assert len(fold_ids(pa.array([text]))[0]) == 0


def test_two_odd_forms_are_one_id_without_a_plain_one():
    forms = IdForms("user")
    forms.add(pa.array(["A1", "b2"]))
    forms.add(pa.chunked_array([["A 1"], ["B3"]]))

    remark, named = remark_of(forms)

    assert remark.startswith("1 user comes in more than one form, such as 'A 1' and 'A1', and counts as several")
    assert named == ["A 1", "A1"] and remark_of(forms, ["A1"])[1] == []


def test_ids_of_one_form_are_no_remark():
    forms = IdForms("item")
    assert forms.remark() is None
    forms.add(pa.array(["a", "A2", "a", "A2", "007"]))
    assert forms.remark() is None


def test_of_more_ids_than_are_kept_a_share_is_compared():
    rng = np.random.default_rng(1)
    forms = IdForms("user", ids_compared_max=1 << 19)
    numbers = rng.permutation(1_000_000)
    for part in np.array_split(numbers, 7):
        forms.add(pa.array([f"u{number}" for number in part.tolist()]))
    forms.add(pa.array([f"U{number}" for number in numbers[:100_000].tolist()]))

    remark, named = remark_of(forms)

    count = int(remark.removeprefix("about ").partition(" ")[0].replace(",", ""))
    assert abs(count - 100_000) < 2_000 and named[0].lower() == named[1]
    assert len(forms._plain_hashes) + len(forms._odd_hash_pairs) <= 1 << 19
