"""What can be wrong in the bench beside Feast without Feast: its skip, its requests, and who holds what."""

import base64
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.bench import peers
from tests.bench.peers import best_form, best_name
from tests.bench.tools.feast_side import ABSENT, Row, columns_of, differing, post, write_rows
from tests.bench.tools.sockets import Driven

RECORD = bytes(range(256))
ROWS = {"u-1": Row(RECORD, ("i-1", "i-2"), (0.1, 0.05)), "u-2": Row(RECORD[::-1], ("i-3", "i-4"), (3.0, -1.5))}


def feast_answer(features: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "metadata": {"feature_names": ["user", *features]},
        "results": [{"values": list(ROWS)}, *({"values": values} for values in features.values())],
    }


def answers() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What Feast and what our service answer of equal records; scores as float32 in JSON."""
    scores = [np.array(row.scores, np.float32).tolist() for row in ROWS.values()]
    records = [base64.b64encode(row.record).decode() for row in ROWS.values()]
    # Feast decides the order of features in an answer.
    arrays = {"scores": scores, "items": [list(row.items) for row in ROWS.values()]}
    forms = {"bytes": feast_answer({"record": records}), "arrays": feast_answer(arrays)}
    # Feast prefixes the features of a vector with their view.
    forms |= {
        f"{form}_vector": feast_answer({f"{form}__{name}": values for name, values in of.items()})
        for form, of in (("bytes", {"record": list(records)}), ("arrays", deepcopy(arrays)))
    }
    larder_answers = [{"items": list(row.items), "scores": list(row.scores)} for row in ROWS.values()]
    return forms, larder_answers


def test_without_feast_the_bench_says_what_to_do_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr("sys.argv", ["peers", "--json", "--quick"])

    peers.main()

    printed_report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed_report["figures"] == {"feast": ABSENT} and "make feast-env" in ABSENT
    assert printed_report["ratios"] == {}


def test_equal_records_differ_for_nobody() -> None:
    forms, larder_answers = answers()

    assert differing(ROWS, forms, larder_answers) == []


@pytest.mark.parametrize("kept_as", ["", "_vector"])
@pytest.mark.parametrize("side", ["record", "items", "scores", "ours", "ours' scores", "absent"])
def test_a_user_whose_record_differs_anywhere_is_named(side: str, kept_as: str) -> None:
    forms, larder_answers = answers()
    columns = columns_of(forms[f"bytes{kept_as}"]) | columns_of(forms[f"arrays{kept_as}"])
    match side:
        case "record":
            columns["record"][1] = base64.b64encode(RECORD).decode()
        case "items":
            columns["items"][1].reverse()
        case "scores":
            columns["scores"][1][0] += 0.5
        case "ours":
            larder_answers[1]["items"] = ["i-3", "i-5"]
        case "ours' scores":
            larder_answers[1]["scores"] = [3.0]
        case "absent":
            columns["record"][1] = None

    assert differing(ROWS, forms, larder_answers) == ["u-2"]


def test_the_file_for_feast_holds_every_record_as_bytes_and_as_arrays(tmp_path: Path) -> None:
    write_rows(tmp_path / "users.parquet", ROWS)

    stored_rows = pq.read_table(tmp_path / "users.parquet").to_pylist()
    assert [stored_row["user"] for stored_row in stored_rows] == list(ROWS)
    for stored_row, row in zip(stored_rows, ROWS.values(), strict=True):
        assert stored_row["record"] == row.record and tuple(stored_row["items"]) == row.items
        assert stored_row["scores"] == np.array(row.scores, np.float32).tolist()


def test_a_request_asks_for_one_form_of_these_users() -> None:
    head, _, body = post("arrays", ["u-1", "u-2"]).partition(b"\r\n\r\n")

    assert head.startswith(b"POST /get-online-features HTTP/1.1\r\n")
    assert json.loads(body) == {"features": ["arrays:items", "arrays:scores"], "entities": {"user": ["u-1", "u-2"]}}


def test_a_request_for_the_kept_vector_names_its_service_and_no_feature() -> None:
    body = post("bytes_vector", ["u-1"]).partition(b"\r\n\r\n")[2]

    expected_fields = {"feature_service": "bytes_vector", "full_feature_names": True}
    assert json.loads(body) == {**expected_fields, "entities": {"user": ["u-1"]}}


def test_feast_is_quoted_in_the_form_that_is_faster() -> None:
    assert best_form({"bytes": 2.0, "bytes_vector": 1.0}) == "bytes"
    assert best_form({"bytes": 1.0, "bytes_vector": 2.0}) == "bytes_vector"
    names = [best_name(1, ""), best_name(1, "_l2"), best_name(100, ""), best_name(100, "_json")]
    assert names == [
        "vs_feast_best_batch1_l1",
        "vs_feast_best_batch1_l2",
        "vs_feast_best_batch100",
        "vs_feast_best_batch100_json",
    ]


def test_a_run_knows_its_rate_by_both_clocks() -> None:
    run = Driven(count=100, wall_s=2.0, cpu_s=0.5)

    assert (run.per_s, run.per_cpu_s, run.busy) == (50.0, 200.0, 0.25)
