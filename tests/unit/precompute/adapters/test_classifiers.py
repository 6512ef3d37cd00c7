"""A classifier as ONNX becomes a folder, or is refused by the name of what does not fit; nothing is written then."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper

from cache.errors import BundleError, ConfigError, LarderError, SourceError
from cache.model.tower import Tower
from infra.cli.check import check_bundle
from precompute.adapters.classifiers import from_classifier
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import all_handovers, chosen_bundle, hand_over
from precompute.bundles.imports import find_import, note_import_begun, read_import_report
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
    model = Bundle.open(tmp_path / "fraud/bundle").value_models["risk"]
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


def test_a_model_that_is_imported_again_after_another_one_is_what_nights_use(tmp_path: Path) -> None:
    # Given two imports, each of which a night used
    folder = tmp_path / "fraud"
    for labels in (LABELS, LABELS[::-1]):
        imported(folder, labels=labels)
        config = night_config(str(folder / "larder.toml"))
        hand_over(config.store(), Bundle.open(folder / "bundle"))
    second = all_handovers(config.store())[-1].bundle_digest

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


def test_a_long_text_of_somebody_is_not_in_the_report(tmp_path: Path) -> None:
    article = "hate " * 8_000
    posts = pa.table({"post": ["p1", "p2"], "text": [article, "spring"]})

    report = from_classifier(examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post")

    assert report.request == {"text": "a text"}
    assert max(map(len, report.lines())) < 1_000
    assert "hate" not in (tmp_path / "to" / "import.json").read_text()


@pytest.mark.parametrize(
    ("changes", "message_pattern"),
    [
        ({"labels": ["ok"]}, "output 'probabilities' has 2 numbers, but there are 1 labels"),
        ({"labels": []}, "labels are empty"),
        ({"id_column": "user"}, "no column 'user' of ids; it has account, f0, f1, f2: give the name of"),
        ({"columns": ["f0", "f1"]}, r"takes 3 columns, but features has 2 \(f0, f1\)"),
        ({"columns": ["f0", "f1", "age"]}, "no column 'age', which the model takes"),
        ({"output": "scores"}, "float outputs are probabilities: give the name of the one"),
        ({"expected": np.zeros((3, 2))}, r"expected has the shape \[3, 2\], but needs \[40, 2\]"),
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
        r"differs from expected by more than 0\.0001 plus 0\.01% of the value plus 0\.0001% of the column's largest "
        r"value for \d+ of 40 rows, at most by [\d.]+, first for 'a0': the model gives [\d.]+, expected is [\d.]+: "
        "were expected and the model computed from the same rows, .* the same codes for categories"
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
        (b"no model", "is not an ONNX model"),
    ],
    ids=["object", "zipmap", "no file", "no onnx"],
)  # fmt: skip
def test_what_is_no_usable_model_is_refused(model: Any, message_pattern: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message_pattern):
        from_classifier(model, TABLE, to=tmp_path / "to", labels=LABELS, id_column="account")

    assert not (tmp_path / "to").exists()


def test_a_locale_that_this_host_lacks_is_refused_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(examples.with_a_locale("xx_YY.UTF-8"), path)
    posts = pa.table({"user": ["p1"], "text": ["hate"]})

    with pytest.raises(BundleError, match="'locale': 'C'") as raised:
        from_classifier(path, posts, to=tmp_path / "to", labels=["score"])

    assert "\n" not in raised.value.message


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


def test_a_model_that_fails_on_zero_is_refused_before_a_night_refuses_it(tmp_path: Path) -> None:
    accounts = pa.table({"account": ["a1", "a2"], "code": [10, 15]})

    with pytest.raises(SourceError, match=r"each row of the table, but not 0 and empty texts.*handle_unknown"):
        from_classifier(examples.of_codes(), accounts, labels=LABELS, id_column="account", to=tmp_path / "to")

    assert not (tmp_path / "to").exists()


def test_a_model_of_which_no_output_is_finite_is_refused(tmp_path: Path) -> None:
    model = examples.linear()
    nan = numpy_helper.from_array(np.full((3, 2), np.nan, np.float32), "coefficients")
    model.graph.initializer[0].CopyFrom(nan)

    with pytest.raises(SourceError, match="the model's output is not finite for any of 40 rows"):
        from_classifier(model, TABLE, labels=LABELS, id_column="account", to=tmp_path / "to")

    assert not (tmp_path / "to").exists()


def regressor() -> onnx.ModelProto:
    """`features` float [n, 3] -> a million times their first."""
    model = examples.linear()
    del model.graph.node[1:], model.graph.output[0]
    weights = np.array([[1e6], [0], [0]], np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "coefficients"))
    model.graph.node[0].output[0] = "price"
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("price", TensorProto.FLOAT, [None, 1]))
    return model


def test_large_numbers_are_compared_by_their_size(tmp_path: Path) -> None:
    expected = FEATURES[:, 0].astype(np.float64) * 1e6
    arguments: dict[str, Any] = {"labels": ["price"], "id_column": "account"}

    report = from_classifier(regressor(), TABLE, to=tmp_path / "to", expected=expected * (1 + 5e-5), **arguments)

    assert report.largest_difference is not None and report.largest_difference > 1
    with pytest.raises(
        SourceError, match=r"of the column's largest value for 40 of 40 rows, .*: were expected and the model"
    ):
        from_classifier(regressor(), TABLE, to=tmp_path / "off", expected=expected * 1.001, **arguments)


def test_rows_that_refuse_a_night_are_said_with_the_share_and_the_threshold(tmp_path: Path) -> None:
    column = [None, float("nan"), *FEATURES[2:, 1].tolist()]
    features = TABLE.set_column(2, "f1", pa.array(column, pa.float32()))

    report = from_classifier(examples.linear(), features, to=tmp_path / "to", labels=LABELS, id_column="account")

    (limit,) = report.limits
    assert "2 of 40 rows (5.00%) cannot be used" in limit
    assert "the gate unusable_rows allows 0.10%" in limit
    assert f"cannot: {limit}" in report.lines()


def test_texts_that_are_too_long_are_said(tmp_path: Path) -> None:
    posts = pa.table({"post": [f"p{row}" for row in range(9)], "text": ["a" * 70_000] * 2 + ["b"] * 7})

    report = from_classifier(examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post")

    answer, night = report.limits
    assert "2 of 9 rows: a text of 'text' is longer than feature_text_bytes (65,536)" in answer
    assert "unusable_rows allows 0.10%" in night


def test_an_id_with_zeros_in_front_stays_as_it_is_in_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("account,f0,f1,f2\n007,1,2,3\n042,1,2,3\n")

    from_classifier(examples.linear(), tmp_path / "rows.csv", labels=LABELS, id_column="account", to=tmp_path / "to")

    assert pq.read_table(tmp_path / "to/user_features.parquet")["user"].to_pylist() == ["007", "042"]


def test_large_numbers_may_be_rounded_at_the_size_of_the_largest(tmp_path: Path) -> None:
    # Given a value near 0 beside values of millions: a float32 sum of such terms keeps seven digits
    features = TABLE.set_column(1, "f0", pa.array([1e-6, *FEATURES[1:, 0].tolist()], pa.float32()))
    expected = np.array([1e-6, *FEATURES[1:, 0]], np.float64) * 1e6
    arguments: dict[str, Any] = {"labels": ["price"], "id_column": "account"}
    largest = np.abs(expected).max()

    off = expected + np.array([largest * 5e-7, *[0.0] * (ROWS - 1)])
    from_classifier(regressor(), features, to=tmp_path / "to", expected=off, **arguments)

    off = expected + np.array([largest * 5e-6, *[0.0] * (ROWS - 1)])
    with pytest.raises(SourceError, match=r"for 1 of 40 rows, .*: differences so small .* smaller scale"):
        from_classifier(regressor(), features, to=tmp_path / "off", expected=off, **arguments)


def test_nan_in_expected_is_named_without_a_warning(tmp_path: Path) -> None:
    expected = examples.probabilities(FEATURES)
    expected[10, 1] = np.nan

    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(SourceError, match="expected holds NaN in 1 rows, first for 'a10'"),
    ):
        imported(tmp_path / "to", expected=expected)


@pytest.mark.parametrize(("text", "remedy"), [("na\u00efve", "exported tokenizers"), ("spring", "the same codes")])
def test_tokenizers_are_named_only_for_letters_beyond_ascii(text: str, remedy: str, tmp_path: Path) -> None:
    posts = pa.table({"post": ["p1"], "text": [text]})

    with pytest.raises(SourceError, match=remedy):
        from_classifier(
            examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post", expected=[1.0],
        )  # fmt: skip


def test_a_column_without_any_value_is_named(tmp_path: Path) -> None:
    posts = pa.table({"post": ["p1", "p2"], "text": pa.array([None, None], pa.string())})

    with pytest.raises(SourceError, match="none of 2 rows of features can be used: 'text' has no value in any row"):
        from_classifier(
            examples.of_texts(), posts, to=tmp_path / "to", labels=["score"], id_column="post", expected=[1.0, 0.0],
        )  # fmt: skip
    assert not (tmp_path / "to").exists()


def constant() -> onnx.ModelProto:
    """`linear` without coefficients: 0.5 for both labels of every row."""
    model = examples.linear()
    zeros = numpy_helper.from_array(np.zeros((3, 2), np.float32), "coefficients")
    model.graph.initializer[0].CopyFrom(zeros)
    return model


def test_a_model_that_says_the_same_of_all_rows_is_said(tmp_path: Path) -> None:
    report = from_classifier(constant(), TABLE, labels=LABELS, id_column="account", to=tmp_path / "to")

    (limit,) = report.limits
    assert "all 40 rows get the same answer (0.5, 0.5)" in limit and "distinct_values" in limit


def test_another_table_in_the_same_folder_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    folder = tmp_path / "fraud"
    imported(folder, table="risk")
    before = Bundle.open(folder / "bundle").digest

    with pytest.raises(SourceError, match=r"\[tables\.risk\].*'risk', but this import only makes 'danger'"):
        imported(folder, table="danger")

    assert Bundle.open(folder / "bundle").digest == before


def test_labels_that_changed_are_said(tmp_path: Path) -> None:
    imported(tmp_path / "fraud")

    report = imported(tmp_path / "fraud", labels=LABELS[::-1])

    said = "labels were ok, fraud, and are fraud, ok from the next night on: inform those who use the values"
    assert said in report.lines()
    assert imported(tmp_path / "fraud", labels=LABELS[::-1]).earlier_labels == ()


def test_the_request_that_is_shown_is_whole_and_of_a_complete_row(tmp_path: Path) -> None:
    features = TABLE.set_column(2, "f1", pa.array([None, *FEATURES[1:, 1].tolist()], pa.float32()))

    report = from_classifier(examples.linear(), features, to=tmp_path / "to", labels=LABELS, id_column="account")

    assert report.request == {"features": pytest.approx(FEATURES[1].tolist())}
    assert any(line.endswith(orjson.dumps(report.request).decode()) for line in report.lines())


def test_each_import_is_written_down_with_its_time_and_file(tmp_path: Path) -> None:
    model, folder = tmp_path / "model.onnx", tmp_path / "fraud"
    onnx.save(examples.linear(), model)
    imported(folder)
    first = Bundle.open(folder / "bundle").digest
    from_classifier(model, TABLE, to=folder, labels=LABELS[::-1], id_column="account")
    second = Bundle.open(folder / "bundle").digest

    imports = read_import_report(folder)["imports"]

    assert [entry["bundle_digest"] for entry in imports] == [first, second]
    assert [entry["source"] for entry in imports] == ["", str(model)]
    assert find_import(folder, first) == imports[0] and imports[0]["imported_at"].endswith("Z")
    assert find_import(folder, "another") == {}


def test_a_table_of_a_value_that_the_bundle_lacks_is_named_by_check(tmp_path: Path) -> None:
    imported(tmp_path / "fraud", table="risk")
    settings = tmp_path / "fraud/larder.toml"
    settings.write_text(settings.read_text().replace('value = "risk"', 'value = "danger"'))

    with pytest.raises(ConfigError, match=r"\[tables\.risk\] has the value 'danger', .*\(it has risk\)"):
        check_bundle(night_config(str(settings)))


@pytest.mark.parametrize(
    ("model", "labels", "classes"),
    [
        (examples.linear_classifier(classlabels_strings=["fraud", "ok"]), LABELS, "fraud, ok"),
        (examples.with_table_of_classes(["fraud", "ok"]), LABELS, "fraud, ok"),
        (examples.linear_classifier(classlabels_ints=[0, 1]), ("1", "0"), "0, 1"),
        (examples.with_table_of_classes(["ok", "spam"]), ("spam", "fine"), "ok, spam"),
    ],
    ids=["attribute", "table of classes", "integers", "one of them"],
)
def test_labels_in_another_order_than_the_classes_of_the_model_are_refused(
    model: onnx.ModelProto, labels: tuple[str, ...], classes: str, tmp_path: Path
) -> None:
    message_pattern = (
        f"labels are {', '.join(labels)}, but the model's classes are {classes}, in this order: .* give the labels in "
        "the order of the classes"
    )

    with pytest.raises(SourceError, match=message_pattern):
        from_classifier(model, TABLE, to=tmp_path / "to", labels=labels, id_column="account")

    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (examples.linear_classifier(classlabels_ints=[0, 1]), ["0 is ok, 1 is fraud"]),
        (examples.with_table_of_classes(["ham", "spam"]), ["ham is ok, spam is fraud"]),
        (examples.with_table_of_classes(["ok", "fraud"]), []),
        (examples.linear(), []),
    ],
    ids=["integers", "other words", "the same", "none"],
)
def test_labels_may_name_the_classes_otherwise_and_the_report_says_how(
    model: onnx.ModelProto, said: list[str], tmp_path: Path
) -> None:
    report = from_classifier(model, TABLE, to=tmp_path / "to", labels=LABELS, id_column="account")

    prefix = "classes of the model: "
    remarks = [line.removeprefix(prefix) for line in report.lines() if line.startswith(prefix)]
    assert remarks == said


@pytest.mark.parametrize(
    ("labels", "message_pattern"),
    [(["ok", ""], "label 2 of ok, is empty"), (["ok", "ok"], "label 'ok' is given twice")],
)
def test_labels_that_name_nothing_are_refused(labels: list[str], message_pattern: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message_pattern):
        imported(tmp_path / "to", labels=labels)


def test_a_retrained_model_whose_numbers_keep_their_places_gets_no_labels_in_another_order(tmp_path: Path) -> None:
    # Given a model, and another training of it
    folder = tmp_path / "fraud"
    imported(folder)
    before = Bundle.open(folder / "bundle").digest
    retrained = examples.with_coefficients(examples.COEFFICIENTS * np.float32(1.1))

    # When its labels are given in the other order, then it is refused
    message_pattern = (
        "labels are fraud, ok, and were ok, fraud at the previous import, but the order of the model's numbers has "
        r"not changed: over 40 rows they differ .* If that order was wrong, first import bundle/prediction.onnx with "
        "the right order"
    )
    with pytest.raises(SourceError, match=message_pattern):
        from_classifier(retrained, TABLE, to=folder, labels=LABELS[::-1], id_column="account")
    assert Bundle.open(folder / "bundle").digest == before

    # But the same model may be imported with corrected labels, and the retrained one after it
    imported(folder, labels=LABELS[::-1])
    from_classifier(retrained, TABLE, to=folder, labels=LABELS[::-1], id_column="account")


def test_a_retrained_model_whose_classes_have_another_order_gets_its_labels_in_that_order(tmp_path: Path) -> None:
    imported(tmp_path / "fraud")
    turned = examples.with_coefficients(examples.COEFFICIENTS[:, ::-1] * np.float32(1.1))

    report = from_classifier(turned, TABLE, to=tmp_path / "fraud", labels=LABELS[::-1], id_column="account")

    assert report.earlier_labels == LABELS


def test_columns_in_another_order_than_before_are_refused_unless_somebody_vouches_for_it(tmp_path: Path) -> None:
    folder, turned = tmp_path / "fraud", TABLE.select(["account", "f1", "f0", "f2"])
    imported(folder)
    assert read_import_report(folder)["columns"] == {"features": ["f0", "f1", "f2"]}

    message_pattern = (
        "columns of 'features' are f1, f0, f2 in this table, and were f0, f1, f2 at the previous import, .*: name them "
        "as columns, in the order of the training, or give expected"
    )
    with pytest.raises(SourceError, match=message_pattern):
        from_classifier(examples.linear(), turned, to=folder, labels=LABELS, id_column="account")

    # With columns given by name, the order of the table does not matter
    report = from_classifier(
        examples.linear(), turned, to=folder, labels=LABELS, id_column="account", columns=["f0", "f1", "f2"],
    )  # fmt: skip
    assert report.earlier_columns == {}
    # Another order is reported
    expected = examples.probabilities(FEATURES[:, [1, 0, 2]])
    report = from_classifier(
        examples.linear(), turned, to=folder, labels=LABELS, id_column="account", expected=expected
    )
    said = "columns of features were f0, f1, f2, and are f1, f0, f2: requests send their values in this order"
    assert any(line.startswith(said) for line in report.lines())


def test_columns_that_nothing_vouches_for_are_named(tmp_path: Path) -> None:
    report = imported(tmp_path / "to")

    said = "features takes f0, f1, f2: did the training have them in this order?"
    assert any(said in line for line in report.lines())


def test_an_import_that_died_keeps_the_labels_and_columns_of_the_one_before_it(tmp_path: Path) -> None:
    imported(tmp_path / "fraud")
    note_import_begun(tmp_path / "fraud")

    report = imported(tmp_path / "fraud", labels=("fine", "fraud"))

    assert report.earlier_labels == LABELS


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        (
            '"user_features.parquet"',
            '"mine.parquet"',
            r"nights read mine.parquet .*, not the rows of this import, .* does not fit the model: .* no column 'f2'",
        ),
        ('bundle = "bundle"', 'bundle = "other"', "nights use the bundle other .*: set it to bundle"),
        ('value = "prediction"', 'value = "prediction"', None),
    ],
    ids=["table", "bundle", "nothing"],
)
def test_kept_settings_that_name_other_files_are_said(was: str, becomes: str, said: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "fraud"
    imported(folder)
    settings = folder / "larder.toml"
    settings.write_text(settings.read_text().replace(was, becomes))
    pq.write_table(TABLE.drop_columns(["f2"]), folder / "mine.parquet")

    report = imported(folder)

    assert list(report.remarks) == [] if said is None else re.search(said, report.remarks[0])
    assert all(remark in report.lines() for remark in report.remarks)
