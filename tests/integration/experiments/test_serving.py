"""An experiment over two real replicas: whole requests of stable keys, each from its arm's namespace alone."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from cache.store.blocklist import change_blocklist
from cache.traffic.experiments import Experiments, latest_experiments
from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption
from serving.client.calls import Options
from serving.client.clients import AsyncClient
from tests.integration.experiments.arms import arms, live_of
from tests.integration.fleet import beating, fleet
from tests.integration.nights import histories, publish_night, roll_back
from tests.polling import poll_until

KEYS = [f"key-{number}" for number in range(120)]
CONTEXT = ssl.create_default_context()
"""Made once, as that takes 50 ms."""
Served = tuple[NightConfig, NightConfig, list[ServiceProcess]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("experiments")
    own_config, arm_config = arms(folder / "night", redis_url)
    # Short bounds, so that a replica soon releases a namespace.
    more = {"LARDER_DEADLINE_MAX_MS": "500", "LARDER_BLOCKLIST_POLL_S": "0.2"}
    with fleet(own_config, folder / "logs", count=2, **more) as services:
        yield own_config, arm_config, services


def start(
    own_config: NightConfig, arm_config: NightConfig, name: str, *, share: float = 0.6, holdout: float | None = None
) -> Experiments:
    named = (ArmOption("control", own_config.namespace, 0.5), ArmOption("b", arm_config.namespace, 0.5))
    return experiments.start(
        own_config, ExperimentOption(own_config.namespace, name, named, share), holdout_share=holdout
    )


def expected(own_config: NightConfig, arm_config: NightConfig, key: str) -> tuple[str, str | None, str | None]:
    """Generation, experiment and arm by the record alone."""
    record = latest_experiments(own_config.store())
    name = record.owners.owner_of(key.encode())
    experiment = None if name is None else record.find(name)
    if experiment is None or not experiment.is_running:
        return live_of(own_config), None, None
    arm = experiment.owners.owner_of(key.encode())
    return live_of(arm_config if arm == "b" else own_config), name, arm


def _client(service: ServiceProcess) -> httpx.Client:
    return httpx.Client(base_url=service.url, verify=CONTEXT)


def get_answers(
    service: ServiceProcess, body: dict[str, Any], status: int = 200, arm: str | None = None
) -> list[dict[str, Any]]:
    with _client(service) as client:
        return _post_lookup(client, body, status, {} if arm is None else {"x-larder-arm": arm})


def _post_lookup(
    client: httpx.Client, body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    content = orjson.dumps(body)
    response = client.post("/v1/lookup/user_topk", content=content, headers=headers or {})
    assert response.status_code == status, response.text
    answers: list[dict[str, Any]] = orjson.loads(response.content).get("answers", [])
    return answers


def get_assignments(service: ServiceProcess, users: list[str]) -> dict[str, Any]:
    """What answers each key; several entities each, so that a torn request would show."""
    assignment_by_key = {}
    with _client(service) as client:
        for key in KEYS:
            answers = _post_lookup(client, {"entities": users, "k": 5, "canary_key": key})
            (assignment_by_key[key],) = {
                (answer["generation"], answer.get("experiment"), answer.get("arm")) for answer in answers
            }
    return assignment_by_key


def followed(own_config: NightConfig, arm_config: NightConfig, services: list[ServiceProcess]) -> None:
    """Waits until every replica answers by the newest record, and from what is live everywhere."""

    def is_so() -> bool:
        return all(
            {replica.served_generation for replica in beating(config)} == {live_of(config)}
            for config in (own_config, arm_config)
        ) and all(version_of(service) == latest_experiments(own_config.store()).version for service in services)

    assert poll_until(is_so)


def version_of(service: ServiceProcess) -> int:
    with _client(service) as client:
        text = client.get("/metrics").text
    (line,) = [
        metric_line for metric_line in text.splitlines() if metric_line.startswith("larder_experiments_version ")
    ]
    return int(float(line.split()[1]))


async def test_arms_answer_whole_requests_of_their_keys_alike_everywhere(served: Served) -> None:
    own_config, arm_config, services = served
    users = sorted(histories(own_config))[:3]

    assert {batch_answer.get("arm") for batch_answer in get_answers(services[0], {"entities": users})} == {None}
    await asyncio.to_thread(start, own_config, arm_config, "ranker", holdout=0.1)
    await asyncio.to_thread(followed, own_config, arm_config, services)
    assignments = [get_assignments(service, users) for service in services]

    assert assignments[0] == assignments[1] == {key: expected(own_config, arm_config, key) for key in KEYS}
    assert len(Counter(assignments[0].values())) == 3
    # Without a key in the request the user's id is the key; a request for several users has none.
    for user in users:
        (answer,) = get_answers(services[1], {"entities": [user]})
        assert (answer["generation"], answer.get("experiment"), answer.get("arm")) == expected(
            own_config, arm_config, user
        )
    assert {batch_answer["generation"] for batch_answer in get_answers(services[0], {"entities": users})} == {
        live_of(own_config)
    }
    # A pinned generation is answered from the namespace that has it.
    for config in (own_config, arm_config):
        (answer, _) = get_answers(
            services[0], {"entities": users[:2], "generation": live_of(config), "canary_key": "k"}
        )
        assert answer["generation"] == live_of(config) and "arm" not in answer


async def test_a_tester_chooses_an_arm_and_one_that_is_not_held_is_refused(served: Served) -> None:
    own_config, arm_config, services = served
    users = sorted(histories(own_config))[:2]
    request_counts_before = scrape_arm_requests(services[0])

    for body, header in (
        ({"entities": users, "arm": "ranker=b"}, None),
        ({"entities": users, "k": 3}, "ranker=b"),
        ({"entities": users, "arm": "ranker=b"}, "ranker=control"),
        ({"entities": users, "arm": "ranker=b", "canary_key": KEYS[0]}, None),
    ):
        answers = get_answers(services[0], body, arm=header)
        assert {(answer["generation"], answer["arm"]) for answer in answers} == {(live_of(arm_config), "b")}
    async with AsyncClient(services[0].url, binary=True) as client:
        (client_answer, *_) = await client.lookup_many("user_topk", users, Options(arm="ranker=b"))
        assert (client_answer.experiment, client_answer.arm, client_answer.generation) == (
            "ranker",
            "b",
            live_of(arm_config),
        )
        single = await client.lookup("user_topk", users[0], Options(arm="ranker=control"))
        assert (single.arm, single.generation) == ("control", live_of(own_config))
        ranked = await client.score(users[0], list(single.items or ())[:3], Options(arm="ranker=b"))
        assert (ranked.arm, ranked.generation) == ("b", live_of(arm_config))
    assert scrape_arm_requests(services[0]) == request_counts_before
    for arm, status in (("ranker=c", 409), ("nobody=b", 409), ("b", 422), ("a=b=c", 422)):
        get_answers(services[0], {"entities": users, "arm": arm}, status)
        get_answers(services[0], {"entities": users}, status, arm)
        with _client(services[0]) as http:
            query = http.get(f"/v1/lookup/user_topk/{users[0]}", params={"arm": arm})
        assert query.status_code == status
    with _client(services[0]) as http:
        explained = http.get(f"/v1/explain/user_topk/{users[0]}", params={"arm": "ranker=b"})
    assert explained.status_code == 422


def scrape_arm_requests(service: ServiceProcess) -> list[str]:
    """Requests of arms, as they are exposed."""
    with _client(service) as client:
        text = client.get("/metrics").text
    return [metric_line for metric_line in text.splitlines() if metric_line.startswith("larder_experiment_requests_")]


async def test_a_night_and_a_roll_back_in_one_arm_are_that_arms_alone(served: Served) -> None:
    own_config, arm_config, services = served
    users, previous_generation = sorted(histories(own_config))[:2], live_of(arm_config)
    mine = live_of(own_config)

    await asyncio.to_thread(publish_night, arm_config, "2026-01-28T12:00:00Z")
    assert live_of(arm_config) != previous_generation and live_of(own_config) == mine
    await asyncio.to_thread(followed, own_config, arm_config, services)
    assert get_assignments(services[0], users) == {key: expected(own_config, arm_config, key) for key in KEYS}
    # Replicas hold the arm's previous generation, too, so its retire leaves it.
    assert all(previous_generation in replica.held_generations for replica in beating(arm_config))
    assert not any(previous_generation in replica.held_generations for replica in beating(own_config))

    await asyncio.to_thread(roll_back, arm_config)
    assert live_of(arm_config) == previous_generation
    await asyncio.to_thread(followed, own_config, arm_config, services)
    assert get_assignments(services[1], users) == {key: expected(own_config, arm_config, key) for key in KEYS}


async def test_an_item_that_the_control_blocks_no_arm_serves_and_an_arms_block_is_its_own(served: Served) -> None:
    own_config, arm_config, services = served
    user = min(histories(own_config))
    arm_bodies = [{"entities": [user], "arm": f"ranker={arm}"} for arm in ("control", "b")]

    def items(body: dict[str, Any]) -> list[str]:
        (answer,) = get_answers(services[0], body)
        item_ids: list[str] = answer["items"]
        return item_ids

    first, second = (items(body) for body in arm_bodies)
    blocked_item = next(item for item in second if item in first)
    change_blocklist(own_config.store(), block_items=[blocked_item.encode()])
    assert poll_until(lambda: not any(blocked_item in items(body) for body in arm_bodies))
    change_blocklist(own_config.store(), unblock_items=[blocked_item.encode()])
    assert poll_until(lambda: all(blocked_item in items(body) for body in arm_bodies))

    change_blocklist(arm_config.store(), block_items=[blocked_item.encode()])
    assert poll_until(lambda: blocked_item not in items(arm_bodies[1]))
    assert blocked_item in items(arm_bodies[0])
    change_blocklist(arm_config.store(), unblock_items=[blocked_item.encode()])


async def test_a_change_of_shares_moves_no_key_but_those_it_names(served: Served) -> None:
    own_config, arm_config, services = served
    users = sorted(histories(own_config))[:2]
    assignment_before = get_assignments(services[0], users)

    await asyncio.to_thread(experiments.change_shares, own_config, "ranker", key_share=0.9)
    await asyncio.to_thread(followed, own_config, arm_config, services)
    after = get_assignments(services[0], users)

    assert after == {key: expected(own_config, arm_config, key) for key in KEYS}
    moved = {key for key in KEYS if after[key] != assignment_before[key]}
    assert moved and {assignment_before[key][1] for key in moved} == {None}


async def test_when_it_stops_its_keys_are_the_services_own_and_the_namespace_is_let_go(served: Served) -> None:
    own_config, arm_config, services = served
    users = sorted(histories(own_config))[:2]

    await asyncio.to_thread(experiments.stop, own_config, "ranker")
    assert poll_until(lambda: not beating(arm_config))

    assert set((get_assignments(services[0], users)).values()) == {(live_of(own_config), None, None)}
    get_answers(services[0], {"entities": users, "arm": "ranker=b"}, 409)
    # And a released namespace is opened again once an experiment names it.
    await asyncio.to_thread(start, own_config, arm_config, "again", share=0.9)
    await asyncio.to_thread(followed, own_config, arm_config, services)
    assert get_assignments(services[1], users) == {key: expected(own_config, arm_config, key) for key in KEYS}
    await asyncio.to_thread(experiments.stop, own_config, "again")
