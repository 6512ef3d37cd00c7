"""Helpers for tests of a night in a Redis Cluster."""

from typing import Any

from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.store.releases import newest_release
from precompute.config.settings import NightConfig
from tests.clusters import Node, TestCluster
from tests.integration.nights import histories
from tests.integration.serving_app import Running
from tests.opened import open_generation

OUTAGES = {"l2_down", "l2_timeout", "breaker_open", "page_missing"}


def live(night: NightConfig) -> str:
    release = newest_release(night.store())
    assert release is not None
    return release.generation


async def look_up_users(app: Running, users: list[str]) -> dict[str, dict[str, Any]]:
    """Look up users: each gets an answer of one generation, with a source, and with a reason unless it is from L2."""
    body = await app.post("/v1/lookup/user_topk", {"entities": users})
    answers = {answer["id"]: answer for answer in body["answers"]}
    assert list(answers) == users
    for answer in answers.values():
        assert answer["source"] == "l2" or answer["reason"] in OUTAGES, answer
    return answers


async def all_from_l2(app: Running, users: list[str]) -> bool:
    return {answer["source"] for answer in (await look_up_users(app, users)).values()} == {"l2"}


def page_key_of(night: NightConfig, user: str) -> str:
    """Return the key of the page with a user's list."""
    manifest, root = open_generation(night.store(), live(night))
    table = manifest.tables["user_topk"]
    directory = Directory.open(root, manifest.entity_sets[table.entity])
    page, _ = table.locate_record(
        *directory.locate_in_part(directory.find_position(hash_id(user.encode(), directory.seed)))
    )
    return night.keyspace().page(manifest.generation, "user_topk", page)


def users_of(night: NightConfig) -> list[str]:
    return sorted(histories(night))


def other_than(servers: TestCluster, home: Node) -> Node:
    return next(node for node in servers.nodes if node is not home)
