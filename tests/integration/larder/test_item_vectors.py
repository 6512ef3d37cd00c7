"""Items as a table of vectors that changes every night: no bundle is brought, a night makes its own."""

import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.errors import SourceError, StoreError
from cache.process.redis_server import RedisServer
from precompute.adapters import vector_bundle
from precompute.config.settings import night_config
from precompute.sources.files import SourceFile, digest_files
from precompute.steps import assemble, begin, embed_items, index, load, publish, quantize, score, verify
from tests.integration.larder.commands import larder, running
from tests.integration.larder.vectors import TOP, Floats, asking, top_items, unit, write
from tests.integration.nights import top_lists
from tests.polling import poll_until

USERS, ITEMS, DIMS = 60, 90, 12
FIRST, LATER = "2026-01-29T00:00:00Z", "2026-01-30T00:00:00Z"
SETTINGS = """
[sources]
item_vectors = "items.parquet"
user_vectors = "users.parquet"

[tables.user_topk]
kind = "user_topk"
k = 50
precision = "f4"

[tables.item_similar]
kind = "item_similar"
precision = "f4"
"""


@pytest.fixture
def items() -> Floats:
    return np.random.default_rng(1).normal(size=(ITEMS, DIMS)).astype(np.float32)


@pytest.fixture
def users() -> Floats:
    rng = np.random.default_rng(2)
    return (rng.normal(size=(USERS, DIMS)) + 0.5 * rng.normal(size=DIMS)).astype(np.float32)


@pytest.fixture
def environ(redis_server: RedisServer) -> dict[str, str]:
    return {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}


@pytest.fixture
def shop(tmp_path: Path, items: Floats, users: Floats) -> Path:
    write(tmp_path / "items.parquet", "item", "i", items)
    write(tmp_path / "users.parquet", "user", "u", users)
    (tmp_path / "larder.toml").write_text(SETTINGS)
    return tmp_path


def test_every_night_answers_from_the_vectors_of_its_day(
    shop: Path, environ: dict[str, str], items: Floats, users: Floats
) -> None:
    everyone = [{"id": f"u{number}"} for number in range(USERS)]

    assert "each night makes it from items.parquet" in larder(shop, "check", environ=environ)
    larder(shop, "night", "--data-until", FIRST, environ=environ)
    with running(shop, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
        look_up = asking(url)
        known_answers = look_up("user_topk", *everyone)
        history = ["i3", "i5", "i8"]
        live, unknown_answer = look_up("user_topk", {"id": "new", "history": history}, {"id": "nobody"})
        (alike,) = look_up("item_similar", {"id": "i7"})

        # Given other vectors of all items, and two items more
        rng = np.random.default_rng(3)
        changed_vectors = items + 0.2 * rng.normal(size=items.shape).astype(np.float32)
        changed_vectors = np.concatenate([changed_vectors, users[:2] / 2])
        write(shop / "items.parquet", "item", "i", changed_vectors)
        larder(shop, "night", "--data-until", LATER, environ=environ)
        first = known_answers[0]["generation"]
        assert poll_until(lambda: look_up("user_topk", everyone[0])[0]["generation"] != first)
        after = look_up("user_topk", *everyone)
        (new_item_answer,) = look_up("item_similar", {"id": f"i{ITEMS}"})

        larder(shop, "roll-back", "--reason", "a test", environ=environ)
        assert poll_until(lambda: look_up("user_topk", everyone[0])[0]["generation"] == first)
        rolled_back_answers = look_up("user_topk", *everyone)

    assert [answer["items"] for answer in known_answers] == top_items(users @ items.T)
    mean = items[[3, 5, 8]].mean(axis=0, keepdims=True) @ items.T
    mean[:, [3, 5, 8]] = -np.inf
    assert live["source"] == "live"
    assert len({*live["items"]} & {*top_items(mean)[0]}) >= TOP - 1  # by the int8 model
    assert unknown_answer["source"] == "default"
    assert unknown_answer["items"] == top_items(users.mean(axis=0, keepdims=True) @ items.T)[0]
    cosines = unit(items) @ unit(items).T
    np.fill_diagonal(cosines, -np.inf)
    assert alike["items"] == top_items(cosines)[7]
    assert [answer["items"] for answer in after] == top_items(users @ changed_vectors.T)
    assert [answer["items"] for answer in after] != [answer["items"] for answer in known_answers]
    cosines = unit(changed_vectors) @ unit(changed_vectors).T
    np.fill_diagonal(cosines, -np.inf)
    assert new_item_answer["items"] == top_items(cosines)[ITEMS]
    assert [answer["items"] for answer in rolled_back_answers] == [answer["items"] for answer in known_answers]


def test_a_night_that_is_begun_again_has_the_same_bundle_and_the_manifest_names_its_table(
    shop: Path, environ: dict[str, str]
) -> None:
    larder(shop, "begin", "--data-until", FIRST, environ=environ)
    larder(shop, "begin", "--data-until", FIRST, environ=environ)
    larder(shop, "night", "--data-until", FIRST, environ=environ)

    (path,) = (shop / ".larder/artifacts").glob("**/manifest.json")
    manifest = json.loads(path.read_text())
    (record,) = (shop / ".larder/artifacts").glob("*/bundles/*.json")
    assert manifest["bundle_digest"] in record.name
    bundle = json.loads((path.parent / "bundle/bundle.json").read_text())
    named = {input_file["name"]: input_file["sha256"] for input_file in manifest["facts"]["inputs"]}
    assert bundle["training"]["item_vectors"]["sha256"] == named["items.parquet"]
    assert named.keys() == {"items.parquet", "users.parquet"}


def test_with_what_users_did_it_is_left_out_and_every_gate_is_asked(
    shop: Path, environ: dict[str, str], items: Floats, users: Floats
) -> None:
    liked = np.argsort(-(users @ items.T), axis=1)[:, :8]
    with (shop / "likes.csv").open("w") as file:
        file.write("user,item\n")
        file.writelines(f"u{user},i{item}\n" for user, row in enumerate(liked) for item in row)
    settings = shop / "larder.toml"
    settings.write_text(settings.read_text().replace("[sources]", '[sources]\ninteractions = ["likes.csv"]'))

    assert "left out" not in larder(shop, "night", "--data-until", FIRST, environ=environ)

    scores = users @ items.T
    np.put_along_axis(scores, liked, -np.inf, axis=1)
    with running(shop, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
        answers = asking(url)("user_topk", *({"id": f"u{number}"} for number in range(USERS)))
    assert [answer["items"] for answer in answers] == top_items(scores)
    (path,) = (shop / ".larder/artifacts").glob("**/bundle/bundle.json")
    training = json.loads(path.read_text())["training"]
    assert {"mean", "ridge 1"} <= training["recalls"].keys()


def test_a_bundle_of_ones_own_and_a_table_of_items_are_one_too_many(shop: Path, environ: dict[str, str]) -> None:
    settings = shop / "larder.toml"
    settings.write_text('bundle = "mine"\n' + settings.read_text())

    output = larder(shop, "night", "--quiet", environ=environ, code=1)

    assert "bundle (" in output and "and sources.item_vectors (items.parquet) are both set" in output
    assert output.count("\n") == 1


def test_every_step_may_run_on_a_host_of_its_own_and_a_retried_begin_finds_its_bundle(
    shop: Path, environ: dict[str, str], items: Floats, users: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = {
        "REDIS_URL": environ["REDIS_URL"],
        "LARDER_NAMESPACE": environ["LARDER_NAMESPACE"],
        "LARDER_ARTIFACTS": f"memory://{uuid.uuid4().hex}",
    }
    config = night_config(str(shop / "larder.toml"), remote)
    hosts = (replace(config, state=str(shop / f"host-{number}")) for number in itertools.count())

    build = begin.run(next(hosts), data_until=FIRST, run_after=None)
    monkeypatch.setattr(vector_bundle, "make_vector_bundle", lambda *_, **__: pytest.fail("made twice"))
    assert begin.run(next(hosts), data_until=FIRST, run_after=None) == build
    embed_items.run(next(hosts), build)
    scored = next(hosts)
    for shard in build["shards"]:
        score.run_shard(scored, build, shard)
    for step in (assemble, index, quantize, load, verify):
        step.run(next(hosts), build)
    publish.run(next(hosts), build, attempt="test")

    everyone = [f"u{number}" for number in range(USERS)]
    lists = top_lists(scored, build["generation"], everyone)
    expected_lists = top_items(users @ items.T, 50)
    assert [list(lists[user]) for user in everyone] == expected_lists


HALF = b"PAR1 half of what is being written"


def test_a_table_that_is_being_written_is_read_again_and_one_that_is_broken_is_not(
    shop: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = night_config(str(shop / "larder.toml"), environ), shop / "items.parquet"
    original_content = path.read_bytes()

    def torn_after(files: Sequence[SourceFile]) -> Any:
        digest_and_files = digest_files(files)
        path.write_bytes(HALF)
        return digest_and_files

    with monkeypatch.context() as patched:
        patched.setattr(begin, "digest_files", torn_after)
        with pytest.raises(StoreError, match="changed while"):  # which Airflow retries
            begin.run(config, data_until=FIRST, run_after=None)
    with pytest.raises(SourceError, match=r"items\.parquet"):
        begin.run(config, data_until=FIRST, run_after=None)
    path.write_bytes(original_content)

    assert begin.run(config, data_until=FIRST, run_after=None)
