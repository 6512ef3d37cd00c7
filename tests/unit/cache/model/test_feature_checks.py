"""What a caller may send as features."""

import pytest

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue
from cache.model.input_preparation import check_features, stack_features
from cache.model.tower_spec import InputSpec

INPUTS = (
    InputSpec("age_in", "feature", "float32", column="age"),
    InputSpec("visits_in", "feature", "int32", column="visits"),
    InputSpec("country_in", "feature", "string", column="country"),
    InputSpec("taste_in", "feature", "float32", column="taste", width=2),
    InputSpec("tags_in", "feature", "int64", column="tags", width=3),
)
GOOD: dict[str, FeatureValue] = {"age": 30.5, "visits": 3, "country": "nl", "taste": (0.5, 1), "tags": (1, 2, 3)}


def test_values_come_back_by_input_name():
    checked = check_features(INPUTS, GOOD)

    assert checked == {"age_in": 30.5, "visits_in": 3, "country_in": "nl", "taste_in": (0.5, 1), "tags_in": (1, 2, 3)}
    assert stack_features(INPUTS[4], [(1, 2, 3)]).dtype == "int64"
    assert stack_features(INPUTS[3], [(0.5, 1), (2.0, 3)]).shape == (2, 2)
    assert stack_features(INPUTS[2], ["nl", "de"]).dtype == object


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("age", "thirty"),
        ("age", True),
        ("age", float("nan")),
        ("age", float("inf")),
        ("age", 1e39),
        ("visits", 3.0),
        ("visits", True),
        ("visits", 2**31),
        ("country", 31),
        ("taste", (0.5,)),
        ("taste", 0.5),
        ("taste", (0.5, float("nan"))),
        ("taste", (0.5, "x")),
        ("taste", (float("nan"), 0.5)),
        ("taste", (0.5, True)),
        ("taste", (0.5, -1e39)),
        ("tags", (1, 2, 3.0)),
        ("tags", (1, 2, True)),
        ("tags", (1, 2, 2**63)),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(column, value):
    with pytest.raises(InvalidInput, match=column) as caught:
        check_features(INPUTS, {**GOOD, column: value})

    assert caught.value.details["field"] == column


def test_an_unknown_feature_is_refused_and_the_known_ones_named():
    with pytest.raises(InvalidInput, match="'agee'; it takes age, country, tags, taste, visits"):
        check_features(INPUTS, {**GOOD, "agee": 3})


def test_a_missing_feature_is_refused():
    with pytest.raises(InvalidInput, match="'visits' is missing"):
        check_features(INPUTS, {name: value for name, value in GOOD.items() if name != "visits"})
