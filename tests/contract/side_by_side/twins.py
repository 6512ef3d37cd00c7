"""Two services of two checkouts over one store, each with its own Redis, which were equal at the start."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import orjson

from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from tests.checkouts import Checkout
from tests.contract.side_by_side.differences import Difference, difference
from tests.contract.side_by_side.exchange import AS_OF, Answer, Line, Request
from tests.contract.side_by_side.world import CALM, RedisCopy, Shop, running_redis
from tests.polling import poll_until

LAUNCH: Final = Path(__file__).with_name("launch")
SETTLE_S: Final = 30.0
SHAPES: Final = frozenset({"getDashboard"})
"""Kinds of requests whose answers hold counts and clocks: names and types alone are compared."""
PROBED_ITEMS: Final = 5
_PROBE_PRICE: Final = 1_000_000
_PROBE_TIME: Final = "2026-01-01T00:00:00Z"
Checkouts = tuple[Checkout, Checkout]
Headers = tuple[tuple[str, str], ...]


class Twins:
    """Both services, which get the same requests in the same order: `left` is the frozen commit's."""

    def __init__(self, shop: Shop, urls: tuple[str, str], redis_urls: tuple[str, str], token: str) -> None:
        self.shop, self.urls, self.redis_urls = shop, urls, redis_urls
        self.headers: Headers = (("Authorization", f"Bearer {token}"),) if token else ()
        self.arms: tuple[str, ...] = ()
        """Arms besides the control that both serve, as a caller forces them; each follows events by itself."""
        self._lines = tuple(map(Line, urls))
        self._as_of = (b"1000000000000-0", b"1000000000000-0")
        self._probes = itertools.count(1)

    def send(self, request: Request) -> tuple[Answer, Answer]:
        """Send a request to both; return the answers."""
        raw = request.raw()
        for line, position in zip(self._lines, self._as_of, strict=True):
            line.send(_with_position(request, raw, position))
        is_head = request.method == "HEAD"
        left_answer, right = (line.receive(is_head=is_head, ends=bool(request.wire)) for line in self._lines)
        return left_answer, right

    def compare(self, request: Request) -> tuple[tuple[Answer, Answer], Difference | None]:
        """Return the answers of both and their difference, once what may lag has settled."""
        is_shape = request.kind in SHAPES
        is_other_type = request.has_other_type
        answers = self.send(request)
        change = difference(*answers, is_shape=is_shape, is_other_type=is_other_type)
        give_up = time.monotonic() + SETTLE_S
        while change is not None and request.settles and time.monotonic() < give_up:
            time.sleep(0.05)  # a bounded poll: what is asked changes nothing
            answers = self.send(request)
            change = difference(*answers, is_shape=is_shape, is_other_type=is_other_type)
        return answers, change

    def move(self, action: Callable[[NightConfig], object]) -> None:
        """Make a move of releases in the left Redis, and copy what it wrote there into the right one."""
        config = self.shop.config(self.redis_urls[0])
        action(config)
        keys = config.keyspace()
        RedisCopy.of(self.redis_urls[0], (keys.live, keys.generations)).restore(self.redis_urls[1])

    def fetch_from_both(self, target: str) -> list[Any]:
        """Return JSON from both, without comparing it."""
        return [orjson.loads(answer.body) for answer in self.send(self.request("GET", target))]

    def follow_events(self, answers: tuple[Answer, Answer], *, has_values: bool) -> None:
        """Wait until both count all events of a request that both accepted, and move AS_OF's position."""
        positions = [orjson.loads(answer.body)["position"].encode() for answer in answers]
        # Lengths are part of a binary body: leave out a position of another length, such as one with fewer digits.
        if all(len(position) == len(AS_OF) for position in positions):
            self._as_of = (positions[0], positions[1])
        self.await_events(has_values=has_values)

    def await_events(self, *, has_values: bool) -> None:
        """Wait until both services and their arms count all events accepted so far.

        Another event, of a user made for it, is sent behind them; one more, with a price, where values were set.
        """
        number = next(self._probes)
        user, price = f"probe-{number}", _PROBE_PRICE + number
        # At most OF_ONE events of one item are accepted, so spread the events of a run over the first items of the
        # shop.
        item, prober = self.shop.facts.items[number % PROBED_ITEMS], self.shop.facts.users[-1]
        events: list[dict[str, Any]] = [{"id": f"probe-{number}", "user": user, "item": item, "time": _PROBE_TIME}]
        if has_values:
            events.append({"id": f"price-{number}", "item": item, "attributes": {"price": price}})
        receipts = self.send(self.request("POST", "/v1/events", {"events": events}))
        assert {answer.status for answer in receipts} == {202}, receipts
        # There are no explanations of an arm.
        paths = [f"/v1/explain/user_vector/{user}"]
        paths += [f"/v1/lookup/user_vector/{user}?{urlencode({'arm': arm})}" for arm in self.arms]
        score_body = {"user": prober, "items": [item], "filter": {"==": ["price", price]}}
        priced_requests = [
            self.request("POST", "/v1/score", body)
            for body in (score_body, *(score_body | {"arm": arm} for arm in self.arms))
        ]

        def have_followed() -> bool:
            if not all(view.get("events") for path in paths for view in self.fetch_from_both(path)):
                return False
            return not has_values or all(
                not orjson.loads(answer.body)["filtered"] for priced in priced_requests for answer in self.send(priced)
            )

        assert poll_until(have_followed, SETTLE_S), (
            f"events are not followed: {[self.fetch_from_both(path) for path in paths]} "
            f"{[self.send(priced) for priced in priced_requests]}"
        )

    def request(self, method: str, target: str, body: Any = None) -> Request:
        """Return a request that is not part of a run."""
        content = b"" if body is None else orjson.dumps(body)
        return Request("probe", method, target, self.headers, content)

    def close(self) -> None:
        """Close both connections."""
        for line in self._lines:
            line.close()


@contextmanager
def twins(
    folder: Path, shop: Shop, checkouts: Checkouts, *, settings: str = "larder", token: str = "", **more: str
) -> Iterator[Twins]:
    """Services of both checkouts, each with a copy of the shop's Redis, over one copy of the shop's folder.

    `token`: the services demand tokens, and all requests have this one.
    """
    shop = shop.copied_to(folder / "shop")
    if token:
        more = {"LARDER_TOKENS_FILE": str(shop.folder / "tokens.json"), **more}
    with ExitStack() as stack:
        services, urls = [], []
        for side, checkout in zip(("left", "right"), checkouts, strict=True):
            url = stack.enter_context(running_redis(folder / f"redis-{side}"))
            shop.redis.restore(url)
            environ = {
                **shop.environ(url, settings), **CALM, **more,
                "LARDER_STATE": str(folder / f"state-{side}"), "LARDER_CHECKOUT": str(checkout.root),
            }  # fmt: skip
            services.append(ServiceProcess(
                folder / f"{side}.log", checkout.environment(environ), module_name="seeded_serving",
                working_folder=LAUNCH,
                python_path=checkout.python,
            ))  # fmt: skip
            urls.append(url)
        with ThreadPoolExecutor(2) as pool:
            for started in [pool.submit(service.__enter__) for service in services]:
                started.result()
        for service in services:
            stack.push(service)
        pair = Twins(shop, (services[0].url, services[1].url), (urls[0], urls[1]), token)
        stack.callback(pair.close)
        yield pair


def _with_position(request: Request, raw: bytes, position: bytes) -> bytes:
    if AS_OF.encode() not in raw or request.wire:
        return raw
    body = request.body.replace(AS_OF.encode(), position)
    return replace(request, target=request.target.replace(AS_OF, position.decode()), body=body).raw()
