"""A classifier as ONNX becomes a folder, or is refused by the name of what does not fit; nothing is written then."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper

from cache.errors import BundleError, LarderError, SourceError
from cache.model.tower import Tower
from precompute.adapters.classifiers import from_classifier
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import chosen_bundle, hand_over, handed_over
from precompute.config.settings import night_config
from tests.unit.precompute.adapters import classifier_examples as examples

ROWS = 40
FEATURES = np.random.default_rng(0).normal(size=(ROWS, examples.WIDTH)).astype(np.float32)
LABELS = ("ok", "fraud")
TABLE = pa.table(
    {"account": [f"a{row}" for row in range(ROWS)]}
    | {f"f{column}": FEATURES[:, column] for column in range(examples.WIDTH)}
)


def imported(to: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"labels": LABELS, "id_column": "account", "to": to}
    return from_classifier(examples.linear(), TABLE, **arguments | changes)


def test_the_bundle_says_what_the_library_says(tmp_path: Path) -> None:
    expected = examples.probabilities(FEATURES)

    report = imported(tmp_path / "fraud", table="risk", expected=expected)

    assert report.rows == ROWS and report.incomplete_rows == 0
    assert report.largest_difference < 1e-6
    assert report.request == {"features": pytest.approx(FEATURES[0].tolist())}
    model = Bundle.open(tmp_path / "fraud/bundle").values["risk"]
    probabilities = Tower.open(model.path, model.spec).run({"features": FEATURES})
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    feature_table = pq.read_table(tmp_path / "fraud/user_features.parquet")
    assert feature_table["user"].to_pylist() == TABLE["account"].to_pylist()
    np.testing.assert_array_equal(np.stack(feature_table["features"].to_numpy()), FEATURES)


def test_another_import_keeps_the_settings(tmp_path: Path) -> None:
    imported(tmp_path / "fraud")
    settings = tmp_path / "fraud/larder.toml"
    settings.write_text(settings.read_text() + "# mine\n")

    report = imported(tmp_path / "fraud")

    assert report.is_again and settings.read_text().endswith("# mine\n")


def test_a_model_that_is_imported_again_after_another_one_is_what_nights_use(
    tmp_path: Path,
) -> None:
    # Given two imports, each of which a night used
    folder = tmp_path / "fraud"
    for labels in (LABELS, LABELS[::-1]):
        imported(folder, labels=labels)
        config = night_config(str(folder / "larder.toml"))
        hand_over(config.store(), Bundle.open(folder / "bundle"))
    second = handed_over(config.store())[-1].digest

    # When the first one is imported again
    report = imported(folder, labels=LABELS)

    # Then nights use it
    assert report.remark == ""
    with chosen_bundle(config) as bundle:
        assert list(bundle.item_ids) == [label.encode() for label in LABELS]
        assert bundle.digest != second


def test_a_model_whose_input_is_no_matrix_is_refused_by_its_axes(tmp_path: Path) -> None:
    model = examples.linear()
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1

    with pytest.raises((SourceError, BundleError), match="has 3 axes"):
        from_classifier(model, TABLE, labels=LABELS, id_column="account", to=tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_file_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there is no file nothere\.parquet"):
        from_classifier(examples.linear(), "nothere.parquet", labels=LABELS, to=tmp_path / "to")


def test_rows_that_lack_a_value_are_counted_and_not_compared(tmp_path: Path) -> None:
    column = [None, float("nan"), *FEATURES[2:, 1].tolist()]
    features = TABLE.set_column(2, "f1", pa.array(column, pa.float32()))
    expected = examples.probabilities(FEATURES)
    expected[:2] = 0.5

    report = from_classifier(
        examples.linear(), features, to=tmp_path / "to", labels=LABELS, id_column="account", expected=expected,
    )  # fmt: skip

    assert report.incomplete_rows == 2
    assert any("2 rows lack a value" in line for line in report.lines())


def test_a_model_of_texts_takes_a_column_of_texts(tmp_path: Path) -> None:
    posts = pa.table({"post": ["p1", "p2"], "text": ["hate", "spring"], "year": [1, 2]})

    report = from_classifier(
        examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post", columns=["text"],
        expected=[2.0, 0.0],
    )  # fmt: skip

    assert report.request == {"text": "hate"} and report.largest_difference == 0


@pytest.mark.parametrize(
    ("changes", "message_pattern"),
    [
        ({"labels": ["ok"]}, "output 'probabilities' has 2 numbers, and there are 1 labels"),
        ({"labels": []}, "labels are empty"),
        ({"id_column": "user"}, "no column 'user' of ids; it has account, f0, f1, f2: name it by id_column"),
        ({"columns": ["f0", "f1"]}, r"takes 3 columns, not the 2 of features \(f0, f1\)"),
        ({"columns": ["f0", "f1", "age"]}, "no column 'age', which the model takes"),
        ({"output": "scores"}, "outputs of numbers are probabilities: name the one"),
        ({"expected": np.zeros((3, 2))}, r"expected is \[3, 2\], \[40, 2\] is wanted"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_written(
    changes: dict[str, Any], message_pattern: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=message_pattern):
        imported(tmp_path / "to", **changes)

    assert not (tmp_path / "to").exists()


def test_a_model_that_says_something_else_than_its_library_is_refused(tmp_path: Path) -> None:
    message_pattern = (
        r"differs from expected by more than 0.0001 plus 0.01% of the value for \d+ of 40 rows, .*, "
        "first for 'a0'"
    )

    with pytest.raises(SourceError, match=message_pattern):
        imported(tmp_path / "to", expected=examples.probabilities(FEATURES)[::-1])

    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("model", "message_pattern"),
    [
        (object(), "model is a object: export it to ONNX first"),
        (examples.with_dictionaries(), "the model gives a list of dictionaries: export it with zipmap off"),
        (Path("none.onnx"), "name the ONNX file"),
        (b"no model", "is no ONNX model"),
    ],
    ids=["object", "zipmap", "no file", "no onnx"],
)  # fmt: skip
def test_what_is_no_usable_model_is_refused(
    model: Any, message_pattern: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=message_pattern):
        from_classifier(model, TABLE, to=tmp_path / "to", labels=LABELS, id_column="account")

    assert not (tmp_path / "to").exists()


def test_a_locale_that_this_host_lacks_is_refused_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(examples.with_a_locale("xx_YY.UTF-8"), path)
    posts = pa.table({"user": ["p1"], "text": ["hate"]})

    with pytest.raises(BundleError, match="'locale': 'C'"):
        from_classifier(path, posts, to=tmp_path / "to", labels=["score"])


def failing() -> onnx.ModelProto:
    """`linear`, which cannot be run on more than three rows."""
    model = examples.linear()
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 3]), "shape"))
    model.graph.node.insert(0, helper.make_node("Reshape", ["features", "shape"], ["shaped"]))
    model.graph.node[1].input[0] = "shaped"
    return model


def test_a_model_that_fails_when_it_is_run_is_named_with_its_input(tmp_path: Path) -> None:
    with pytest.raises(LarderError, match=r"cannot be run on features") as raised:
        from_classifier(failing(), TABLE, labels=LABELS, id_column="account", to=tmp_path / "to")

    assert "\n" not in raised.value.message and not (tmp_path / "to").exists()


def test_a_model_of_which_no_output_is_finite_is_refused(tmp_path: Path) -> None:
    model = examples.linear()
    nan = numpy_helper.from_array(np.full((3, 2), np.nan, np.float32), "coefficients")
    model.graph.initializer[0].CopyFrom(nan)

    with pytest.raises(SourceError, match="no output of the model is finite, on none of 40 rows"):
        from_classifier(model, TABLE, labels=LABELS, id_column="account", to=tmp_path / "to")

    assert not (tmp_path / "to").exists()


def regressor() -> onnx.ModelProto:
    """`features` float [n, 3] -> a million times their first."""
    model = examples.linear()
    del model.graph.node[1:], model.graph.output[0]
    weights = np.array([[1e6], [0], [0]], np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "coefficients"))
    model.graph.node[0].output[0] = "price"
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("price", TensorProto.FLOAT, [None, 1])
    )
    return model


def test_large_numbers_are_compared_by_their_size(tmp_path: Path) -> None:
    expected = FEATURES[:, 0].astype(np.float64) * 1e6
    arguments: dict[str, Any] = {"labels": ["price"], "id_column": "account"}

    report = from_classifier(
        regressor(), TABLE, to=tmp_path / "to", expected=expected * (1 + 5e-5), **arguments
    )

    assert report.largest_difference is not None and report.largest_difference > 1
    with pytest.raises(
        SourceError, match=r"by more than 0\.0001 plus 0\.01% of the value for 40 of"
    ):
        from_classifier(
            regressor(), TABLE, to=tmp_path / "off", expected=expected * 1.001, **arguments
        )


def test_rows_that_refuse_a_night_are_said_with_the_share_and_the_threshold(tmp_path: Path) -> None:
    column = [None, float("nan"), *FEATURES[2:, 1].tolist()]
    features = TABLE.set_column(2, "f1", pa.array(column, pa.float32()))

    report = from_classifier(
        examples.linear(), features, to=tmp_path / "to", labels=LABELS, id_column="account"
    )

    (limit,) = report.limits
    assert "2 of 40 rows (5.00%) cannot be used" in limit
    assert "the gate unusable_rows lets 0.10% pass" in limit
    assert f"cannot: {limit}" in report.lines()


def test_texts_that_are_too_long_are_said(tmp_path: Path) -> None:
    posts = pa.table(
        {"post": [f"p{row}" for row in range(9)], "text": ["a" * 70_000] * 2 + ["b"] * 7}
    )

    report = from_classifier(
        examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post"
    )

    answer, night = report.limits
    assert "2 of 9 rows: a text of 'text' is longer than feature_text_bytes (65,536)" in answer
    assert "unusable_rows lets 0.10% pass" in night


def test_an_id_with_zeros_in_front_stays_as_it_is_in_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("account,f0,f1,f2\n007,1,2,3\n042,1,2,3\n")

    from_classifier(
        examples.linear(),
        tmp_path / "rows.csv",
        labels=LABELS,
        id_column="account",
        to=tmp_path / "to",
    )

    assert pq.read_table(tmp_path / "to/user_features.parquet")["user"].to_pylist() == [
        "007",
        "042",
    ]
