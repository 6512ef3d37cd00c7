"""Vectors of items and users, and nothing that anybody did: from two tables to served answers, and back again."""

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.process.redis_server import RedisServer
from tests.integration.larder.commands import larder, running
from tests.integration.larder.vectors import TOP, Floats, asking, top_items, unit, write
from tests.polling import poll_until

USERS, ITEMS, DIMS = 60, 90, 12
LATER = "2026-01-30T00:00:00Z"
FIRST = "2026-01-29T00:00:00Z"


@pytest.fixture(scope="module")
def items() -> Floats:
    return np.random.default_rng(1).normal(size=(ITEMS, DIMS)).astype(np.float32)


@pytest.fixture(scope="module")
def users() -> Floats:
    """Vectors that have something in common, so that a mean says something."""
    rng = np.random.default_rng(2)
    return (rng.normal(size=(USERS, DIMS)) + 0.5 * rng.normal(size=DIMS)).astype(np.float32)


@pytest.fixture
def shop(tmp_path: Path, items: Floats, users: Floats, redis_server: RedisServer) -> Any:
    """A folder that was imported, and its settings."""
    write(tmp_path / "items.parquet", "item", "i", items)
    write(tmp_path / "users.parquet", "user", "u", users)
    arguments = ("--items", "items.parquet", "--users", "users.parquet", "--to", "shop", "--json")
    import_report = json.loads(larder(tmp_path, "import", "vectors", *arguments))
    assert import_report["clicks"] == 0 and not any(
        "have a night yet" in limitation for limitation in import_report["cannot"]
    )
    assert any("there are no clicks" in limitation for limitation in import_report["cannot"])
    settings = tmp_path / "shop/larder.toml"
    settings.write_text(settings.read_text().replace("k = 100", 'k = 50\nprecision = "f4"'))
    environ = {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}
    return tmp_path / "shop", environ


def test_known_users_have_their_best_items_strangers_are_folded_in_and_a_night_follows_a_night(
    shop: tuple[Path, dict[str, str]], items: Floats, users: Floats
) -> None:
    folder, environ = shop
    everyone = [{"id": f"u{number}"} for number in range(USERS)]

    assert "none of them of interactions" in larder(folder, "check", environ=environ)
    night_output = larder(folder, "night", "--data-until", FIRST, environ=environ)
    assert "left out, since there are no interactions: stale_lists, heldout_recall" in night_output
    with running(folder, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
        look_up = asking(url)
        known_answers = look_up("user_topk", *everyone)
        history = ["i3", "i5", "i8"]
        live, unknown_answer = look_up("user_topk", {"id": "new", "history": history}, {"id": "nobody"})
        (alike,) = look_up("item_similar", {"id": "i7"})

        changed_vectors = users + 0.3 * np.roll(users, 1, axis=0)
        write(folder / "user_vectors.parquet", "user", "u", changed_vectors)
        larder(folder, "night", "--data-until", LATER, environ=environ)
        first = known_answers[0]["generation"]
        assert poll_until(lambda: look_up("user_topk", everyone[0])[0]["generation"] != first)
        after = look_up("user_topk", *everyone)

        larder(folder, "roll-back", "--reason", "a test", environ=environ)
        assert poll_until(lambda: look_up("user_topk", everyone[0])[0]["generation"] == first)
        rolled_back_answers = look_up("user_topk", *everyone)

    assert [answer["items"] for answer in known_answers] == top_items(users @ items.T)
    assert {answer["source"] for answer in known_answers} <= {"l1", "l2"}
    for answer, row in zip(known_answers, users @ items.T, strict=True):
        assert np.allclose(answer["scores"], np.sort(row)[::-1][:TOP], rtol=1e-5)
    mean = items[[3, 5, 8]].mean(axis=0, keepdims=True) @ items.T
    mean[:, [3, 5, 8]] = -np.inf
    assert live["source"] == "live"
    assert len({*live["items"]} & {*top_items(mean)[0]}) >= TOP - 1  # by the int8 model
    assert unknown_answer["source"] == "default"
    assert unknown_answer["items"] == top_items(users.mean(axis=0, keepdims=True) @ items.T)[0]
    cosines = unit(items[[7]]) @ unit(items).T
    cosines[:, 7] = -np.inf
    assert alike["items"] == top_items(cosines)[0]
    assert [answer["items"] for answer in after] == top_items(changed_vectors @ items.T)
    assert [answer["items"] for answer in rolled_back_answers] == [answer["items"] for answer in known_answers]


def test_what_the_manifest_says_of_a_night_without_interactions(shop: tuple[Path, dict[str, str]]) -> None:
    folder, environ = shop

    verified = larder(folder, "night", "--data-until", FIRST, environ=environ)

    assert "stale_lists" in verified
    (path,) = (folder / "artifacts").glob("**/manifest.json")
    manifest = json.loads(path.read_text())
    facts, rules = manifest["facts"], {gate["rule"]: gate for gate in manifest["gates"]}
    assert facts["without_interactions"] and facts["interactions"] == 0 and facts["probe"] is None
    assert facts["gates_left_out"] == ["stale_lists", "heldout_recall"]
    assert not rules.keys() & {"stale_lists", "heldout_recall"}
    assert rules["int8_overlap"]["note"].endswith("on histories drawn at random")
    assert rules["int8_overlap"]["value"] > 0.9
    assert manifest["models"]["user_tower"]["agreement"]["histories"] == "drawn"
    assert rules["index_recall"]["value"] == 1.0
    assert "is live already" in larder(folder, "night", "--data-until", FIRST, environ=environ)


def test_features_of_users_are_too_little_for_a_user_tower_that_takes_a_history(
    shop: tuple[Path, dict[str, str]],
) -> None:
    folder, environ = shop
    pq.write_table(pa.table({"user": ["u1"], "age": [3]}), folder / "features.parquet")
    settings = folder / "larder.toml"
    settings_text = settings.read_text()
    settings.write_text(settings_text.replace('user_vectors = "user_vectors', 'user_features = "features'))

    refused = larder(folder, "night", "--quiet", environ=environ, code=1)

    assert "the model takes a history and no features" in refused


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (None, "sources.interactions is empty, and so are sources.user_vectors and"),
        (np.empty((0, DIMS), np.float32), "it has no rows"),
        (np.ones((5, DIMS + 1), np.float32), f"of its 5 rows none is; each is a list of {DIMS} "),
    ],
    ids=["not configured", "empty", "other dimensions"],
)
def test_vectors_that_no_night_can_be_made_of_are_refused_in_one_line(
    shop: tuple[Path, dict[str, str]], vectors: Floats | None, message: str
) -> None:
    folder, environ = shop
    settings = folder / "larder.toml"
    if vectors is None:
        settings.write_text(settings.read_text().replace("user_vectors =", "# user_vectors ="))
    else:
        column = pa.array([row.tolist() for row in vectors], pa.list_(pa.float32()))
        ids = [str(number) for number in range(len(vectors))]
        pq.write_table(
            pa.table({"user": pa.array(ids, pa.string()), "vector": column}), folder / "user_vectors.parquet"
        )

    output = larder(folder, "night", "--quiet", environ=environ, code=1)

    assert message in output and output.count("\n") == 1
