"""Models that read texts, in every shape that libraries export: the same answers by night, live and over HTTP."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper

from cache.errors import ConfigError, Refused
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles.bundle import ModelFile
from precompute.bundles.onnx_model import OnnxModel
from precompute.config.settings import NightConfig, TableConfig
from tests.integration import nights
from tests.integration.feature_towers import (
    COUNTRIES,
    from_history_and_country,
    from_taste,
    vectors_column,
    with_towers,
)
from tests.integration.serving_app import serving
from tests.opened import open_generation

TOKENS = ("ham", "spam", "eggs")
SCORES = (0.25, -1.5, 3.0)
UNKNOWN_SCORE = 0.5
TEXT_BYTES = 5_000
LONG_TEXT = "x" * (TEXT_BYTES + 1)
# `tests.regressions` runs these tests at commits that lack this setting.
LIMIT: dict[str, Any] = {"feature_text_bytes": TEXT_BYTES} if hasattr(NightConfig, "feature_text_bytes") else {}


@dataclass(frozen=True)
class Shape:
    """One way in which a model takes texts; `sent` makes a caller's value and `stored` a table's of some words."""

    name: str
    width: int | None
    is_list: bool

    def value(self, tokens: list[str]) -> Any:
        """A value of the feature that holds these words."""
        return tokens if self.is_list else tokens[0]


SHAPES = (
    Shape("one text of shape [n]", None, False),
    Shape("one text of shape [n, 1]", 1, False),
    Shape("a list of one text", 1, True),
    Shape("a list of three texts", 3, True),
)


def value_model(width: int | None) -> ModelFile:
    """Value model: the sum of a score for each word of `text`."""
    dims: list[str | int] = ["n"] if width is None else ["n", width]
    nodes = [
        helper.make_node("Reshape", ["text", "shape"], ["words"]),
        helper.make_node(
            "LabelEncoder",
            ["words"],
            ["scores"],
            domain="ai.onnx.ml",
            keys_strings=list(TOKENS),
            values_floats=list(SCORES),
            default_float=UNKNOWN_SCORE,
        ),
        helper.make_node("ReduceSum", ["scores", "axes"], ["risk"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "risk",
        [helper.make_tensor_value_info("text", TensorProto.STRING, dims)],
        [helper.make_tensor_value_info("risk", TensorProto.FLOAT, ["n", 1])],
        [
            helper.make_tensor("shape", TensorProto.INT64, [2], [-1, width or 1]),
            helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    spec = TowerSpec((InputSpec("text", "feature", "string", column="text", width=width),), "risk", 1)
    return ModelFile(OnnxModel(model.SerializeToString()), spec, labels=("risk",))


def score(tokens: list[str]) -> float:
    """What the model says of these words."""
    score_by_token = dict(zip(TOKENS, SCORES, strict=True))
    return sum(score_by_token.get(token, UNKNOWN_SCORE) for token in tokens)


@dataclass(frozen=True)
class World:
    """A night whose users have texts: what each of them has, and who has one that is too long."""

    night: NightConfig
    shape: Shape
    tokens_by_user: dict[str, list[str]]
    long_user: str


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def world(tmp_path_factory: pytest.TempPathFactory, redis_url: str, request: pytest.FixtureRequest) -> World:
    shape: Shape = request.param
    folder = tmp_path_factory.mktemp("texts")
    night = nights.prepare(folder, redis_url, users=120, items=60)
    users = sorted(nights.histories(night))
    count = shape.width or 1
    tokens_by_user = {
        user: [[*TOKENS, "new"][(row + index) % 4] for index in range(count)] for row, user in enumerate(users)
    }
    long_user = users[7]
    texts = [shape.value(tokens_by_user[user]) for user in users]
    texts[7] = shape.value([LONG_TEXT] * count)
    kind = pa.list_(pa.string()) if shape.is_list else pa.string()
    columns = {"user": users, "text": pa.array(texts, kind), "country": pa.array([0] * len(users), pa.int64())}
    pq.write_table(pa.table(columns), folder / "users.parquet")
    night = replace(
        night,
        **LIMIT,
        sources=replace(night.sources, user_features="users.parquet"),
        tables={
            "user_topk": TableConfig("user_topk", k=20),
            "risk": TableConfig("value", precision="f4", value="risk"),
        },
    )
    pq.write_table(  # the item tower reads them
        pa.table({
            "item": pq.read_table(folder / "items.parquet")["item"],
            "looks": pa.array([[1.0 * (row % 7)] * 16 for row in range(60)], pa.list_(pa.float32())),
        }),
        folder / "items.parquet",
    )  # fmt: skip
    with_towers(night, from_history_and_country, {"risk": value_model(shape.width)})
    nights.publish_night(night, nights.DATA_UNTIL)
    return World(night, shape, tokens_by_user, long_user)


async def test_stored_and_live_answers_are_the_models(world: World) -> None:
    async with serving(world.night, **LIMIT) as running:
        for user, tokens in list(world.tokens_by_user.items())[:5]:
            stored_answer = await running.get(f"/v1/lookup/risk/{user}")
            text = world.shape.value(tokens)
            stranger = {"id": f"stranger-{user}", "features": {"text": text}}
            body = await running.post("/v1/lookup/risk", {"entities": [stranger]})
            (live,) = body["answers"]

            assert stored_answer["source"] in ("l1", "l2")
            assert stored_answer["values"] == pytest.approx([score(tokens)])
            assert live["source"] == "live"
            assert live["values"] == stored_answer["values"]


async def test_a_text_that_is_too_long_is_refused_by_day_and_counted_by_night(world: World) -> None:
    count = world.shape.width or 1
    entity = {"id": "stranger", "features": {"text": world.shape.value([LONG_TEXT] * count)}}
    async with serving(world.night, **LIMIT) as running:
        refused = await running.http.post("/v1/lookup/risk", json={"entities": [entity]})
        stored_answer = await running.get(f"/v1/lookup/risk/{world.long_user}")

    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["limit"]) == (422, "feature_too_long", TEXT_BYTES)
    assert stored_answer["values"] is None
    manifest, _ = open_generation(world.night.store(), stored_answer["generation"])
    reasons = manifest.facts["unusable"]["user_features.text"]["reasons"]
    (reason,) = reasons
    assert "feature_text_bytes" in reason
    assert reasons[reason]["cases"] == [{"user": world.long_user}]


async def test_texts_of_another_shape_are_refused_by_name(world: World) -> None:
    wrong: Any = ["a"] * ((world.shape.width or 0) + 1) if world.shape.is_list else 3.0
    body = {"entities": [{"id": "stranger", "features": {"text": wrong}}]}
    async with serving(world.night, **LIMIT) as running:
        refused = await running.http.post("/v1/lookup/risk", json=body)

    assert refused.status_code == 422
    assert "'text'" in refused.json()["error"]["message"]


def test_a_model_that_no_replica_can_run_is_not_published(tmp_path: Path, redis_url: str) -> None:
    """The graph opens and answers stored rows; the blank input that a replica warms up with breaks it."""
    night = nights.prepare(tmp_path, redis_url, users=120, items=60)
    users = sorted(nights.histories(night))
    columns = {
        "user": users,
        "age": pa.array([20 + row % 9 for row in range(len(users))]),
        "country": pa.array([0] * len(users)),
    }
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")
    items = pq.read_table(tmp_path / "items.parquet")["item"]
    looks_column = pa.array([[1.0 * (row % 7)] * 16 for row in range(60)], pa.list_(pa.float32()))
    pq.write_table(pa.table({"item": items, "looks": looks_column}), tmp_path / "items.parquet")
    night = replace(
        night,
        sources=replace(night.sources, user_features="users.parquet"),
        tables={"risk": TableConfig("value", precision="f4", value="risk")},
    )
    with_towers(night, from_history_and_country, {"risk": model_that_wants_an_age()})

    with pytest.raises(Refused) as refusal:
        nights.publish_night(night, nights.DATA_UNTIL)

    assert "live_models" in str(refusal.value)


def model_that_wants_an_age() -> ModelFile:
    """Value model that looks `age` up in a table without a row for 0, so that a blank input is out of bounds."""
    rows = [[0.5]] * 40
    nodes = [
        helper.make_node("Sub", ["age", "first"], ["shifted"]),
        helper.make_node("Mul", ["shifted", "far"], ["row"]),
        helper.make_node("Gather", ["rows", "row"], ["risk"]),
    ]
    graph = helper.make_graph(
        nodes,
        "risk",
        [helper.make_tensor_value_info("age", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("risk", TensorProto.FLOAT, ["n", 1])],
        [
            helper.make_tensor("first", TensorProto.INT64, [1], [20]),
            helper.make_tensor("far", TensorProto.INT64, [1], [4]),
            helper.make_tensor("rows", TensorProto.FLOAT, [40, 1], [row[0] for row in rows]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    spec = TowerSpec((InputSpec("age", "feature", "int64", column="age"),), "risk", 1)
    return ModelFile(OnnxModel(model.SerializeToString()), spec, labels=("risk",))


@pytest.mark.parametrize("user_tower", [from_history_and_country, lambda _items: from_taste()])
async def test_a_table_of_features_is_enough_for_a_classifier(
    tmp_path: Path, redis_url: str, user_tower: Callable[[int], ModelFile]
) -> None:
    night = nights.prepare(tmp_path, redis_url, users=120, items=60)
    token_by_account = {f"account-{row}": TOKENS[row % 3] for row in range(120)}
    accounts = {
        "user": list(token_by_account),
        "text": list(token_by_account.values()),
        "taste": vectors_column(len(token_by_account), 2),
        "country": pa.array([row % COUNTRIES for row in range(len(token_by_account))], pa.int64()),
    }
    pq.write_table(pa.table(accounts), tmp_path / "accounts.parquet")
    looks_column = vectors_column(60, 3)
    items = pq.read_table(tmp_path / "items.parquet")["item"]
    pq.write_table(pa.table({"item": items, "looks": looks_column}), tmp_path / "items.parquet")
    with_towers(night, user_tower, {"risk": value_model(None)})
    night = replace(
        night,
        sources=replace(night.sources, interactions=(), user_features="accounts.parquet"),
        tables={"risk": TableConfig("value", precision="f4", value="risk")},
    )

    nights.publish_night(night, nights.DATA_UNTIL)
    nights.publish_night(night, nights.NEXT)

    async with serving(night) as running:
        for account, token in list(token_by_account.items())[:6]:
            answer = await running.get(f"/v1/lookup/risk/{account}")
            assert answer["values"] == [score([token])] and answer["producer"] == "batch"


def test_features_alone_are_refused_for_a_model_of_histories(tmp_path: Path, redis_url: str) -> None:
    night = nights.prepare(tmp_path, redis_url, users=20, items=20)
    users = pa.table({"user": ["a", "b"], "country": pa.array([0, 1], pa.int64())})
    pq.write_table(users, tmp_path / "users.parquet")
    sources = replace(night.sources, interactions=(), user_features="users.parquet")

    with pytest.raises(ConfigError, match="the model takes a history and no features: name"):
        nights.publish_night(replace(night, sources=sources), nights.DATA_UNTIL)
