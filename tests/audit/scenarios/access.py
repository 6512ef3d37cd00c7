"""Tokens, quotas, TLS, several workers, and overload."""

from __future__ import annotations

import random
import signal
import ssl
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

from tests.audit.client import Client
from tests.audit.processes import Service, wait_until
from tests.audit.reference import Input
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Shape, Shop

GUARD = "docs/how-to/guard-a-service.md: "
SCOPES = ("read", "score", "feedback", "events", "explain", "admin")


def run_access(stage: Stage) -> None:
    """Named tokens with scopes and quotas over two workers, TLS with client certificates, overload."""
    shop = Shop.make(
        stage.folder / "access", stage.servers, stage.report, stage.seed, Shape(users=80, items=80), "access"
    )
    shop.night()
    try:
        _try_tokens(stage, shop)
        _try_tls(stage, shop)
        _try_overload(stage, shop)
    finally:
        shop.close()


def _add_token(shop: Shop, file: Path, name: str, *options: str) -> str:
    finished_command = shop.site.run("tokens", "--file", str(file), "add", name, *options, "--json")
    document = finished_command.document()
    (token,) = [value for key, value in document.items() if key == "token"]
    return str(token)


def _try_tokens(stage: Stage, shop: Shop) -> None:
    file = shop.folder / "tokens.json"
    tokens = {scope: _add_token(shop, file, scope, "--scope", scope) for scope in SCOPES}
    service = shop.serve("--workers", "2", environment={"LARDER_TOKENS_FILE": str(file), "LARDER_TOKEN": "w" * 40})
    user = shop.world.users[0]
    requests: list[tuple[str, str, object, str]] = [
        ("GET", "/v1/lookup/user_topk/x", None, "read"),
        ("POST", "/v1/lookup/user_topk", {"entities": [user]}, "read"),
        ("POST", "/v1/lookup", {"entities": [{"table": "user_topk", "id": user}]}, "read"),
        ("GET", "/v1/generations", None, "read"),
        ("POST", "/v1/score", {"user": user, "items": ["x"]}, "score"),
        ("POST", "/v1/feedback", {"event": "click", "canary_key": "x"}, "feedback"),
        ("POST", "/v1/events", {"events": [{"user": "token user", "item": "x", "id": "t1"}]}, "events"),
        ("GET", "/v1/explain/user_topk/x", None, "explain"),
        ("POST", "/v1/explain/user_topk", {"entities": [user]}, "explain"),
        ("GET", "/dashboard/data", None, "admin"),
    ]
    used: Counter[str] = Counter()
    for name, token in [*tokens.items(), ("none", None), ("wrong", "x" * 40)]:
        client = Client(service.port, token)
        for method, target, body, scope in requests:
            reply = client.send(method, target, body)
            if name in tokens:
                used[name] += 1
            if name == scope:
                right = reply.status in (200, 202)
                expected: object = "answered"
            elif name in tokens:
                error = (reply.body or {}).get("error", {})
                right = (reply.status, reply.code) == (403, "scope_missing")
                right = right and error.get("scope") == scope and error.get("scopes") == [name]
                expected = [403, "scope_missing", scope]
            else:
                right, expected = ((reply.status, reply.code) == (401, "unauthorized"), [401, "unauthorized"])
            stage.require(
                right,
                "scopes",
                "docs/reference/http-api.md: the scope that each request needs is in the first table",
                expected,
                {"token": name, "status": reply.status, "body": reply.body},
                [f"token with scope {name}: {method} {target}"],
            )
        for target in ("/healthz", "/readyz", "/metrics", "/dashboard", "/docs", "/openapi.json"):
            reply = client.send("GET", target)
            stage.require(
                reply.status == 200,
                "open pages",
                GUARD + "Health, `/metrics`, the dashboard's page and `/docs` need no token",
                200,
                [target, reply.status],
            )
        client.close()
    _revoke(stage, shop, service, file, tokens["feedback"])
    _try_quotas(stage, shop, service, file)
    _count_tokens(stage, service, used)
    _roll_workers(stage, shop, service, tokens["read"])
    shop.close()


def _revoke(stage: Stage, shop: Shop, service: Service, file: Path, token: str) -> None:
    shop.site.run("tokens", "--file", str(file), "revoke", "feedback", "--reason", "audit")

    def is_refused() -> bool:
        statuses = set()
        for _ in range(8):
            client = Client(service.port, token)
            statuses.add(client.send("POST", "/v1/feedback", {"event": "click", "canary_key": "x"}).status)
            client.close()
        return statuses == {401}

    try:
        wait_until(is_refused, 5, "every worker refuses the token", 0.05)
    except AssertionError as error:
        stage.report.violate(
            "revoke", GUARD + "A running service reads a changed file within a second", "", str(error), []
        )
    stage.report.count("revocations")


def _try_quotas(stage: Stage, shop: Shop, service: Service, file: Path) -> None:
    rate = 20
    by_request = _add_token(shop, file, "r", "--scope", "read", "--requests-per-s", str(rate))
    by_entity = _add_token(shop, file, "e", "--scope", "read", "--scope", "events", "--entities-per-s", str(rate))

    def is_known() -> bool:
        statuses = set()
        for _ in range(6):
            client = Client(service.port, by_entity)
            statuses.add(client.send("GET", "/v1/generations").status)
            client.close()
        return 401 not in statuses

    wait_until(is_known, 5, "the new tokens are known", 0.1)
    users = list(shop.world.users)
    for name, token, quota, size in (
        ("r", by_request, "requests_per_s", 1),
        ("e", by_entity, "entities_per_s", 1),
        ("e", by_entity, "entities_per_s", 7),
    ):
        passed = refused = 0
        _wait_for_room(service, token, users[:size])
        started_at = time.monotonic()
        while time.monotonic() - started_at < 2.5:
            client = Client(service.port, token)
            reply = client.lookup("user_topk", [*users[:size]], k=1)
            client.close()
            if reply.status == 200:
                passed += size
                continue
            refused += 1
            error = (reply.body or {}).get("error", {})
            stage.require(
                (reply.status, reply.code, error.get("quota")) == (429, "quota_exceeded", quota)
                and int(reply.headers.get("retry-after", "0")) >= 1
                and error.get("retry_after_seconds", -1) >= 0,
                "quota refusal",
                GUARD + "429 `quota_exceeded` (`quota` names it, `Retry-After` in whole seconds, ...)",
                quota,
                [reply.status, reply.body, reply.headers],
            )
        elapsed_s = time.monotonic() - started_at
        stage.require(
            passed <= rate * (elapsed_s + 1) + size,
            "quota",
            GUARD + "over T seconds, at most rate x (T + 1); exactly over all its workers",
            f"at most {rate * (elapsed_s + 1):g} in {elapsed_s:.1f} s",
            {"token": name, "passed": passed, "refused": refused, "size": size},
            [f"two workers, --{quota.replace('_', '-')} {rate}, lookups of {size} ids one after the other"],
        )
        if refused:
            passed_min = rate * elapsed_s * 0.6 - rate
            stage.require(
                passed >= passed_min,
                "quota",
                GUARD + "Quotas ... limit requests a second",
                f"at least {passed_min:g}",
                passed,
            )
    _try_large_batch(stage, service, by_entity, users, rate)


def _wait_for_room(service: Service, token: str, users: list[str]) -> None:
    wait_until(lambda: _passes(service, token, users), 8, "the quota has room", 0.3)


def _passes(service: Service, token: str, users: list[str]) -> bool:
    client = Client(service.port, token)
    try:
        return client.lookup("user_topk", [*users], k=1).status == 200
    finally:
        client.close()


def _try_large_batch(stage: Stage, service: Service, token: str, users: list[str], rate: int) -> None:
    """A batch larger than the rate passes once a whole second is free, and later requests wait for it."""
    size = 3 * rate
    wait_until(lambda: _passes(service, token, users[:size]), 6, "a large batch passes", 0.1)
    batch_passed_at = time.monotonic()
    early = _passes(service, token, users[:1])
    stage.require(
        not early,
        "quota of a large batch",
        GUARD
        + "A batch that is larger than that passes once a whole second of the rate is free, and is paid for afterwards",
        "the next id is refused",
        "answered",
        [f"entities_per_s {rate}: a batch of {size}, then a batch of 1 at once"],
    )
    wait_until(lambda: _passes(service, token, users[:1]), 10, "the batch is paid for", 0.05)
    paid = time.monotonic() - batch_passed_at
    stage.require(
        paid > (size - rate) / rate - 0.7,
        "quota of a large batch",
        GUARD + "... and is paid for afterwards",
        f"about {(size - rate) / rate:g} s",
        paid,
    )


def _count_tokens(stage: Stage, service: Service, used: Counter[str]) -> None:
    metrics = Client(service.port).metrics()
    for name in ("read", "score", "events", "explain", "admin"):
        request_count = sum(
            value
            for key, value in metrics.items()
            if key.startswith("larder_token_requests_total{") and f'token="{name}"' in key
        )
        refused = sum(
            value
            for key, value in metrics.items()
            if key.startswith("larder_token_refusals_total{") and f'token="{name}"' in key
        )
        stage.require(
            used[name] in (request_count, request_count + refused),
            "token metrics",
            GUARD + "The caller's name is in `larder_token_requests_total{token}`",
            used[name],
            {"token": name, "requests": request_count, "refusals": refused},
        )


def _roll_workers(stage: Stage, shop: Shop, service: Service, token: str) -> None:
    """SIGHUP replaces one worker after the other, and no request is refused."""
    client = Client(service.port, token)
    rng = random.Random(f"workers {stage.seed}")
    for _ in range(40):
        shop.service.client.close()
        shop.ask_once(rng)
    assert service.process is not None
    service.process.send_signal(signal.SIGHUP)
    signalled_at = time.monotonic()
    while time.monotonic() - signalled_at < 8:
        client.close()
        reply = client.lookup("user_topk", [rng.choice(shop.world.users)], k=1)
        stage.require(
            reply.status == 200,
            "rolling workers",
            "infra/ENVIRONMENT.md: SIGHUP: one worker after the other is replaced; nobody is refused",
            200,
            [reply.status, reply.body],
        )
    client.close()
    ready = sum(value for name, value in Client(service.port).metrics().items() if name.startswith("larder_ready"))
    stage.require(
        ready in (2, 3), "workers", "infra/ENVIRONMENT.md: `count(larder_ready)` is how many answer", "2 or 3", ready
    )


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def _issue(folder: Path, name: str, authority: str) -> None:
    (folder / "names.cnf").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl(
        folder,
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
        "-subj",
        f"/CN={name}",
    )
    _openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
        "-CAcreateserial", "-days", "3", "-extfile", "names.cnf", "-out", f"{name}.pem",
    )  # fmt: skip


def _try_tls(stage: Stage, shop: Shop) -> None:
    folder = shop.folder / "tls"
    folder.mkdir()
    for name in ("ca", "stranger"):
        _openssl(
            folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            "-days", "3", "-subj", f"/CN={name}",
        )  # fmt: skip
    for name, authority in (("first", "ca"), ("second", "ca"), ("caller", "ca"), ("intruder", "stranger")):
        _issue(folder, name, authority)
    for part in ("pem", "key"):
        (folder / f"service.{part}").write_bytes((folder / f"first.{part}").read_bytes())
    service = Service(
        shop.site,
        (),
        {
            "LARDER_TLS_CERTIFICATE": str(folder / "service.pem"),
            "LARDER_TLS_KEY": str(folder / "service.key"),
            "LARDER_TLS_CLIENT": "required",
            "LARDER_TLS_CLIENT_CA": str(folder / "ca.pem"),
        },
    )

    def context(certificate: str | None) -> ssl.SSLContext:
        tls_context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        if certificate is not None:
            tls_context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
        return tls_context

    service.client.tls = context("caller")
    service.start()
    shop.services.append(service)
    shop.knowledge.answered.clear()
    shop.knowledge.change()
    rng = random.Random(f"tls {stage.seed}")
    for _ in range(15):
        shop.ask_once(rng)
    for certificate in (None, "intruder"):
        stage.require(
            not _can_speak(Client(service.port, tls=context(certificate), timeout_s=5)),
            "client certificates",
            GUARD + 'tls_client = "required"',
            "no answer",
            f"answered with certificate {certificate}",
        )
    stage.require(
        not _can_speak(Client(service.port, timeout_s=5)),
        "tls alone",
        GUARD + "The service then speaks only HTTPS",
        "",
        "HTTP",
    )
    previous_serial = _serial(service.port, context("caller"))
    for part in ("key", "pem"):
        waiting = folder / f"next.{part}"
        waiting.write_bytes((folder / f"second.{part}").read_bytes())
        waiting.rename(folder / f"service.{part}")
    try:
        wait_until(
            lambda: _serial(service.port, context("caller")) != previous_serial, 6, "the new certificate is sent", 0.1
        )
    except AssertionError as error:
        stage.report.violate("tls renewal", GUARD + "within two seconds new connections use them", "", str(error), [])
    stage.report.count("certificates renewed")
    shop.close()


def _can_speak(client: Client) -> bool:
    try:
        return client.send("GET", "/healthz").status == 200
    except (OSError, ValueError):
        return False
    except Exception as error:  # what a peer that speaks TLS sends is no HTTP
        return "HTTP" in type(error).__module__
    finally:
        client.close()


def _serial(port: int, context: ssl.SSLContext) -> object:
    client = Client(port, tls=context)
    connection = client._connect()
    try:
        connection.connect()
        sock = connection.sock
        assert isinstance(sock, ssl.SSLSocket)
        return (sock.getpeercert() or {}).get("serialNumber")
    finally:
        client.close()


def _try_overload(stage: Stage, shop: Shop) -> None:
    """Under more load than it can take, the service refuses with 503, and its other answers are right."""
    service = shop.serve(environment={"LARDER_REQUESTS_MAX": "2", "LARDER_QUEUE_TARGET_MS": "5"})
    know = shop.knowledge
    know.impaired = True
    statuses: Counter[int] = Counter()
    lock = threading.Lock()
    health: list[int] = []
    over = time.monotonic() + 4

    def hammer(number: int) -> None:
        rng = random.Random(f"overload {stage.seed} {number}")
        client = Client(service.port)
        while time.monotonic() < over:
            history = tuple(rng.sample(list(shop.world.items), 5))
            entities = [Input(f"crowd {number}", history, 1).body(), *rng.sample(shop.world.users, 20)]
            reply = client.lookup("user_topk", entities, k=5)
            with lock:
                statuses[reply.status] += 1
                if reply.status == 200:
                    for entity, answer in zip(entities, reply.body["answers"], strict=True):
                        id_ = entity if isinstance(entity, str) else None
                        had_items = {item for _, _, item in shop.generation.clicks.get(id_ or "", [])}
                        if had_items & set(answer["items"]):
                            stage.report.violate("had", "under overload", sorted(had_items), answer, client.recent[-1:])
                elif (reply.status, reply.code) != (503, "overloaded") or "retry-after" not in reply.headers:
                    stage.report.violate(
                        "overload",
                        "docs/reference/http-api.md: 503 `overloaded` with `Retry-After`",
                        503,
                        [reply.status, reply.body, reply.headers],
                        client.recent[-1:],
                    )
        client.close()

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    while time.monotonic() < over:
        client = Client(service.port)
        health.append(client.send("GET", "/healthz").status)
        client.close()
    for thread in threads:
        thread.join()
    stage.require(
        set(health) == {200},
        "health under overload",
        "docs/reference/http-api.md: ready answers from memory, health and metrics never do",
        200,
        dict(Counter(health)),
    )
    metrics = service.client.metrics()
    shed = sum(
        value
        for name, value in metrics.items()
        if name.startswith("larder_shed_total{") and 'stage="live"' not in name and 'stage="gone"' not in name
    )
    stage.require(
        shed == statuses[503],
        "shed metrics",
        "docs/reference/http-api.md: `larder_shed_total` counts by `stage`",
        statuses[503],
        {name: value for name, value in metrics.items() if name.startswith("larder_shed_total{")},
    )
    stage.report.count("answers under overload", statuses[200])
    stage.report.count("refusals under overload", statuses[503])
    know.impaired = False
    know.change()
