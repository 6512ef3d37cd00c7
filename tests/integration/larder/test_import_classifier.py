"""A classifier, from its ONNX file and a table to served answers: no clicks, no vectors, no items of anybody."""

import json
import uuid
from pathlib import Path

import httpx
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.process.redis_server import RedisServer
from tests.integration.larder.commands import larder, running
from tests.unit.precompute.adapters import classifier_examples as examples

USERS = 150


def environment_of(redis_server: RedisServer) -> dict[str, str]:
    """Variables of a namespace of its own on the server."""
    return {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}


def write_accounts(path: Path) -> tuple[list[str], NDArray[np.float32]]:
    """Write a table of accounts; return their ids and features float32 [USERS, WIDTH]."""
    rows = np.random.default_rng(1).normal(size=(USERS, examples.WIDTH)).astype(np.float32)
    columns = {f"f{number}": rows[:, number] for number in range(examples.WIDTH)}
    ids = [f"a{number}" for number in range(USERS)]
    pq.write_table(pa.table({"account": ids, **columns}), path)
    return ids, rows


def test_known_and_unknown_accounts_get_what_the_library_says(redis_server: RedisServer, tmp_path: Path) -> None:
    environ = environment_of(redis_server)
    ids, rows = write_accounts(tmp_path / "accounts.parquet")
    onnx.save(examples.linear(), tmp_path / "model.onnx")
    expected = examples.probabilities(rows)
    np.save(tmp_path / "expected.npy", expected)

    import_output = larder(
        tmp_path, "import", "classifier", "model.onnx", "--features", "accounts.parquet", "--id-column", "account",
        "--labels", "ok,fraud", "--table", "risk", "--expected", "expected.npy", "--to", "fraud", "--json",
    )  # fmt: skip
    folder = tmp_path / "fraud"
    checked = larder(folder, "check", environ=environ)
    night = larder(folder, "night", environ=environ)
    with running(folder, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
        status = json.loads(larder(folder, "status", "--json", environ=environ))
        body = {"entities": [*ids, {"id": "new", "features": {"features": rows[7].tolist()}}]}
        answers = httpx.post(f"{url}/v1/lookup/risk", json=body).json()["answers"]

    assert json.loads(import_output)["largest_difference"] < 1e-6
    assert "users are those of user_features.parquet" in checked
    assert "too little data" not in night and " not judged" in night
    assert status["model"]["name"] == "risk" and status["model"]["source"] == "model.onnx"
    assert status["model"]["imported_at"] <= status["published_at"]
    assert {answer["source"] for answer in answers[:-1]} == {"l2"}
    assert answers[-1]["source"] == "live" and answers[-1]["labels"] == ["ok", "fraud"]
    values = np.array([answer["values"] for answer in answers])
    np.testing.assert_allclose(values, [*expected, expected[7]], atol=1e-6)


def test_labels_are_corrected_and_columns_are_taken_by_their_names(redis_server: RedisServer, tmp_path: Path) -> None:
    # Given a night of a model whose labels were given in the wrong order
    environ = environment_of(redis_server)
    ids, rows = write_accounts(tmp_path / "accounts.parquet")
    onnx.save(examples.linear_classifier(classlabels_ints=[0, 1]), tmp_path / "model.onnx")
    arguments = ("import", "classifier", "model.onnx", "--features", "accounts.parquet", "--id-column", "account")
    larder(tmp_path, *arguments, "--labels", "fraud, ok", "--table", "risk", "--to", "fraud")
    folder = tmp_path / "fraud"
    larder(folder, "night", environ=environ)

    # When they are corrected
    imported = larder(tmp_path, *arguments, "--labels", "ok, fraud", "--table", "risk", "--to", "fraud")
    night = larder(folder, "night", environ=environ)

    # Then import and night say so
    assert "labels were fraud, ok, and are ok, fraud from the next night on" in imported
    said = "and are ok, fraud, so that each number has another position: inform those who use the values"
    assert said in " ".join(night.split())

    # And a night of the team's own table, whose columns have another order, takes them by name
    table = pq.read_table(tmp_path / "accounts.parquet").select(["account", "f2", "f0", "f1"])
    pq.write_table(table, folder / "accounts.parquet")
    settings = (folder / "larder.toml").read_text()
    own_table = 'user_features = "accounts.parquet"\nuser_column = "account"'
    settings = settings.replace('user_features = "user_features.parquet"', own_table)
    (folder / "larder.toml").write_text(settings)
    assert "to do" not in larder(folder, "check", environ=environ)
    larder(folder, "night", environ=environ)
    with running(folder, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
        answers = httpx.post(f"{url}/v1/lookup/risk", json={"entities": ids}).json()["answers"]
    assert {answer["source"] for answer in answers} == {"l2"}
    assert answers[0]["labels"] == ["ok", "fraud"]
    values = np.array([answer["values"] for answer in answers])
    np.testing.assert_allclose(values, examples.probabilities(rows), atol=1e-6)
