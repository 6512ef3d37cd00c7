"""A service and nights before a Redis whose replies are replaced, one after the other, by malformed ones.

The orders are all of (command that was seen, number of the reply, malformation), in an order that the seed decides. The
quick tests try a few, the long ones go on for LARDER_FUZZ_MINUTES and say how many of all they tried.

A service under forged replies answers each lookup with 200. What it says to be stored (`l1`, `l2`) is the true answer.
Its memory stays within a bound, no request fails, and once nothing is forged it answers from Redis again. A night ends
with 0 or with an error, and what is published then is answered rightly by a service that sees the true Redis. A service
that starts may end at once, if the next start is well. No night and no start ends with an error of Python's.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from tests.blackbox import USERS, RunningService, Shop, StartFailed, open_shop, started
from tests.forged.malformations import MALFORMATIONS
from tests.forged.proxy import PUSHED, ForgingProxy, Order, forging
from tests.forged.resp import command_name, command_words, reply_end
from tests.polling import poll_until

SEED = int(os.environ.get("LARDER_SEED", "0"))
MINUTES = float(os.environ.get("LARDER_FUZZ_MINUTES", "5"))
TABLE = "/v1/lookup/user_topk"
K = 5
GROWTH_MAX_BYTES = 96 << 20
RECOVERY_S = 30.0
FAILURE_CHARS = 2_400
IMPATIENT = {
    "LARDER_L1_BYTES": "1",  # each lookup asks Redis
    "LARDER_L2_DEADLINE_MS": "150",
    "LARDER_BREAKER_COOLDOWN_S": "0.1",
    "LARDER_POLL_S": "0.1",
    "LARDER_BLOCKLIST_POLL_S": "0.1",
    "LARDER_HEARTBEAT_S": "0.1",
    "LARDER_FIGURES_S": "0.1",
}
Truth = dict[str, tuple[list[str], list[float]]]
"""Items and scores by the user's id."""


@dataclass(frozen=True)
class World:
    """A shop whose commands reach Redis through a proxy, the real Redis, and the right answers."""

    shop: Shop
    proxy: ForgingProxy
    redis_url: str
    truth: Truth


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[World]:
    with forging(redis_url) as proxy:
        shop = open_shop(tmp_path_factory.mktemp("shop"), f"redis://127.0.0.1:{proxy.port}/0")
        with started(shop, tmp_path_factory.mktemp("first") / "log") as service:
            truth = {user: stored_list(get_answer(service, user)) for user in USERS}
        yield World(shop, proxy, redis_url, truth)


@pytest.fixture
def service(world: World, tmp_path: Path) -> Iterator[RunningService]:
    """A service that sees Redis through the proxy."""
    world.proxy.forge(None)
    log = tmp_path / "log"
    with started(world.shop, log, **IMPATIENT) as running:
        assert poll_until(lambda: is_well(world, running))
        yield running
    assert_no_request_failed(log)


def assert_no_request_failed(log: Path) -> None:
    """Fail if a log has an error of a request. Loops in the background may fail: they are run again."""
    text = log.read_text()
    for failure_text in ("lookup failed", "request failed", "Exception in ASGI", "Task exception was never retrieved"):
        assert failure_text not in text, text[-4_000:]


def request(service: RunningService, path: str, body: object = None) -> tuple[int, dict]:  # type: ignore[type-arg]
    """Status and JSON of a GET, or of a POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    http_request = urllib.request.Request(  # noqa: S310 - the service of this test
        service.url + path, data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(http_request, timeout=30) as response:  # noqa: S310
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, {}


def get_answer(service: RunningService, user: str) -> dict:  # type: ignore[type-arg]
    """The answer to a GET of one user, which has to be one."""
    status, answer = request(service, f"{TABLE}/{user}?k={K}")
    assert status == 200, (user, status)
    return answer


def stored_list(answer: dict) -> tuple[list[str], list[float]]:  # type: ignore[type-arg]
    """Items and scores of an answer that says to be stored."""
    assert answer["source"] in ("l1", "l2"), answer
    return answer["items"], answer["scores"]


def hold_for_answers(world: World, service: RunningService, users: Sequence[str]) -> None:
    """Fail unless these users, one by one and together, get true answers or admitted substitutes."""
    answers = [get_answer(service, user) for user in users]
    status, batch = request(service, TABLE, {"entities": list(users), "k": K})
    assert status == 200, status
    for user, answer in zip([*users, *users], [*answers, *batch["answers"]], strict=True):
        assert answer["id"] == user
        if answer["source"] in ("l1", "l2"):
            assert (answer["items"], answer["scores"]) == world.truth[user], answer


def is_well(world: World, service: RunningService) -> bool:
    """Return whether users are answered from Redis, and rightly."""
    try:
        return all(stored_list(get_answer(service, user)) == world.truth[user] for user in USERS[:3])
    except (AssertionError, OSError):
        return False


def shuffled_orders(commands: dict[str, int], numbers: Sequence[int | None]) -> list[Order]:
    """All orders for these commands, of which so many replies were seen, in an order of the seed."""
    orders = {
        Order(command, malformation, None if number is None else number % count)
        for command, count in commands.items()
        for malformation in MALFORMATIONS
        for number in numbers
    }
    order_list = sorted(orders, key=lambda order: (order.command, order.malformation, str(order.number)))
    random.Random(SEED).shuffle(order_list)
    return order_list


def spread_over_commands(orders: Sequence[Order], count: int) -> list[Order]:
    """The first orders, as many of each command as of any other, up to so many in all."""
    by_command: dict[str, list[Order]] = {}
    for order in orders:
        by_command.setdefault(order.command, []).append(order)
    rounds = [order for layer in zip(*by_command.values(), strict=False) for order in layer]
    return rounds[:count]


def seen_by_service(world: World, service: RunningService) -> dict[str, int]:
    """The commands of a running service, with how many replies came to each."""
    world.proxy.replies.clear()
    world.proxy.drop_connections()
    assert poll_until(lambda: is_well(world, service))
    assert poll_until(lambda: world.proxy.replies["INFO"] > 0 and world.proxy.replies["HSET"] > 1)
    assert poll_until(lambda: is_well(world, service))
    return {name: count for name, count in world.proxy.replies.items() if name != PUSHED}


def hold_in_service(world: World, service: RunningService, order: Order, rng: random.Random) -> int:
    """Fail unless a running service withstands an order; the number of replies that were forged."""
    world.proxy.forge(order)
    if order.command.startswith(("CLIENT", "SUBSCRIBE", "HELLO", "AUTH", "SELECT")):
        world.proxy.drop_connections()
    hold_for_answers(world, service, rng.sample(USERS, 3))
    poll_until(lambda: world.proxy.forged > 0, 1.0)
    hold_for_answers(world, service, rng.sample(USERS, 2))
    forged = world.proxy.forged
    world.proxy.forge(None)
    assert poll_until(lambda: is_well(world, service), RECOVERY_S), f"no recovery from {order}"
    return forged


def hold_in_services(world: World, service: RunningService, count: int | None, until_s: float) -> None:
    """Fail unless a running service withstands `count` orders, or as many as there is time for."""
    rng, initial_bytes = random.Random(SEED), service.resident_bytes
    orders = shuffled_orders(seen_by_service(world, service), (None, 0, 1))
    orders_to_try = orders if count is None else spread_over_commands(orders, count)
    tried = forged = 0
    for order in orders_to_try:
        if time.monotonic() > until_s:
            break
        try:
            forged += hold_in_service(world, service, order, rng) > 0
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, {order}: {error}") from error
        tried += 1
        grown = service.resident_bytes - initial_bytes
        assert grown < GROWTH_MAX_BYTES, f"seed {SEED}, {order}: {grown} bytes more"
    print(f"seed {SEED}: {tried} of {len(orders)} orders of a running service, {forged} of them forged a reply")
    print(f"memory grew by {(service.resident_bytes - initial_bytes) / (1 << 20):.1f} MiB")
    assert forged > tried / 3


def test_a_service_withstands_malformed_replies(world: World, service: RunningService) -> None:
    hold_in_services(world, service, 24, time.monotonic() + 30)


@pytest.mark.storm
def test_a_service_withstands_all_malformed_replies(world: World, service: RunningService) -> None:
    hold_in_services(world, service, None, time.monotonic() + 20 * MINUTES)


def is_wordless(output: str) -> bool:
    """Return whether a program ended with a Python error that names no cause."""
    return "Traceback" in output or "internal error" in output


def assert_no_traceback(order: Order, output: str) -> None:
    """Fail if what a program told under an order is an error of Python's."""
    assert not is_wordless(output), f"{order} ends without a word: {output[-2_000:]}"


def hold_at_start(world: World, order: Order, log: Path) -> None:
    """Fail unless a service that starts under an order withstands it, or ends with a word of what is wrong."""
    world.proxy.forge(order)
    try:
        hold_once_started(world, order, log)
    except StartFailed as error:
        world.proxy.forge(None)
        assert_no_traceback(order, str(error))
        hold_once_started(world, None, log)


def hold_once_started(world: World, order: Order | None, log: Path) -> None:
    """Fail unless a service starts, withstands an order that is given, and is well soon after it is withdrawn."""
    with started(world.shop, log, **IMPATIENT) as service:
        for user in USERS[:2]:
            status, answer = request(service, f"{TABLE}/{user}?k={K}")
            # Without a generation, nothing can be answered.
            assert status in (200, 503), status
            if status == 200 and answer["source"] in ("l1", "l2"):
                assert stored_list(answer) == world.truth[user], answer
        world.proxy.forge(None)
        assert poll_until(lambda: is_well(world, service), RECOVERY_S), f"no recovery from {order}"
    assert_no_request_failed(log)


def hold_at_starts(world: World, folder: Path, count: int | None, until_s: float) -> None:
    """Fail unless services start under `count` orders, or under as many as there is time for."""
    world.proxy.forge(None)
    world.proxy.replies.clear()
    with started(world.shop, folder / "log", **IMPATIENT) as service:
        assert poll_until(lambda: is_well(world, service))
    orders = shuffled_orders(dict(world.proxy.replies), (None, 0))
    tried, failures = 0, []
    for order in orders if count is None else spread_over_commands(orders, count):
        if time.monotonic() > until_s:
            break
        try:
            hold_at_start(world, order, folder / f"log-{tried}")
        except AssertionError as error:
            failures.append(f"{order}: {str(error)[:FAILURE_CHARS]}")
        tried += 1
    print(f"seed {SEED}: {tried} of {len(orders)} orders of a service that starts")
    assert not failures, f"seed {SEED}: {len(failures)} of {tried}\n" + "\n".join(failures)


def test_a_service_starts_under_a_malformed_reply(world: World, tmp_path: Path) -> None:
    hold_at_starts(world, tmp_path, 1, time.monotonic() + 30)


@pytest.mark.storm
def test_a_service_starts_under_all_malformed_replies(world: World, tmp_path: Path) -> None:
    hold_at_starts(world, tmp_path, None, time.monotonic() + 15 * MINUTES)


@dataclass(frozen=True)
class Nights:
    """Nights through the proxy, and a service that sees the true Redis."""

    world: World
    service: RunningService
    redis: Redis
    pointer_key: bytes

    def pointer(self) -> bytes:
        """The pointer as it stands in Redis."""
        value = self.redis.get(self.pointer_key)
        assert isinstance(value, bytes)
        return value

    def run(self, order: Order | None) -> tuple[int, str, int]:
        """Exit code and all output of a night that has new work to do, under an order; the replies forged."""
        clicks = self.world.shop.folder / "clicks.csv"
        os.utime(clicks)
        self.world.proxy.forge(order)
        completed = self.world.shop.run("night", "--quiet", timeout_s=180)
        forged = self.world.proxy.forged
        self.world.proxy.forge(None)
        return completed.returncode, completed.stdout + completed.stderr, forged

    def hold_under_order(self, order: Order) -> int:
        """Fail unless a night under an order publishes nothing wrong and tells what is; the replies forged."""
        code, output, forged = self.run(order)
        assert code in (0, 1, 2, 3), (code, output)
        assert code == 0 or output.strip(), "no word of what is wrong"
        self.hold_for_published()
        assert_no_traceback(order, output)
        return forged

    def hold_for_published(self) -> None:
        """Fail unless the service follows the pointer, and answers rightly with what it names."""

        def follows() -> bool:
            _, generations = request(self.service, "/v1/generations")
            served = str(generations.get("generation", "") or generations)
            return any(
                generation_name and generation_name in served for generation_name in generation_words(self.pointer())
            )

        assert poll_until(follows, 20), (self.pointer(), request(self.service, "/v1/generations"))
        for user in USERS[::40]:
            answer = get_answer(self.service, user)
            assert (answer["source"], answer["items"], answer["scores"]) == ("l2", *self.world.truth[user])


def generation_words(pointer: bytes) -> list[str]:
    """Names of generations in a pointer: a time and a digest."""
    text = pointer.decode("latin-1")
    return [token for token in text.replace('"', " ").replace(":", " ").replace(",", " ").split() if "Z-" in token]


@pytest.fixture
def nights(world: World, tmp_path: Path) -> Iterator[Nights]:
    world.proxy.forge(None)
    redis = Redis.from_url(world.redis_url)
    namespace = world.shop.environ["LARDER_NAMESPACE"].encode()
    keys = [key for key in redis.scan_iter(b"larder:*") if namespace in key and key.endswith(b":live")]
    assert len(keys) == 1, keys
    direct = IMPATIENT | {"REDIS_URL": world.redis_url, "LARDER_L2_DEADLINE_MS": "2000"}
    with started(world.shop, tmp_path / "log", **direct) as service:
        yield Nights(world, service, redis, keys[0])
    redis.close()


def hold_in_nights(nights: Nights, count: int | None, until_s: float) -> None:
    """Fail unless `count` nights withstand an order, or as many as there is time for, and one without any succeeds."""
    nights.world.proxy.replies.clear()
    code, output, _ = nights.run(None)
    assert code == 0, output
    nights.hold_for_published()
    reply_counts = {name: count for name, count in nights.world.proxy.replies.items() if name != PUSHED}
    orders = shuffled_orders(reply_counts, (None, 0, -1))
    tried, forged, failures = 0, 0, []
    for order in orders if count is None else spread_over_commands(orders, count):
        if time.monotonic() > until_s:
            break
        try:
            forged += nights.hold_under_order(order) > 0
        except AssertionError as error:
            failures.append(f"{order}: {str(error)[:FAILURE_CHARS]}")
        tried += 1
    code, output, _ = nights.run(None)
    assert code == 0, output
    nights.hold_for_published()
    assert not failures, f"seed {SEED}: {len(failures)} of {tried}\n" + "\n".join(failures)
    print(f"seed {SEED}: {tried} of {len(orders)} orders of a night, {forged} forged a reply")


def test_a_night_publishes_nothing_wrong_under_malformed_replies(nights: Nights) -> None:
    hold_in_nights(nights, 1, time.monotonic() + 20)


@pytest.mark.storm
def test_a_night_publishes_nothing_wrong_under_all_malformed_replies(nights: Nights) -> None:
    hold_in_nights(nights, None, time.monotonic() + 25 * MINUTES)


@pytest.mark.parametrize(("reply", "end"), [
    (b"+OK\r\n", 5), (b"$3\r\na\r\n\r\n", 9), (b"$-1\r\n", 5), (b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n:7\r\n", 18),
    (b"%1\r\n+a\r\n+b\r\n", 12),
    (b"|1\r\n+a\r\n+b\r\n:1\r\n", 16), (b"*-1\r\n", 5), (b"$3\r\nab", None), (b"*2\r\n:1\r\n", None), (b"", None),
])  # fmt: skip
def test_replies_end_where_they_say(reply: bytes, end: int | None) -> None:
    assert reply_end(reply) == end


def test_commands_are_read_by_their_names() -> None:
    command_bytes = b"*2\r\n$3\r\nget\r\n$1\r\na\r\n*3\r\n$6\r\nclient\r\n$7\r\nsetinfo\r\n$1\r\nb\r\n*1\r\n"
    first = command_words(command_bytes)
    assert first is not None
    second = command_words(command_bytes, first[1])
    assert second is not None
    assert [command_name(command_parts) for command_parts, _ in (first, second)] == ["GET", "CLIENT SETINFO"]
    assert command_words(command_bytes, second[1]) is None
