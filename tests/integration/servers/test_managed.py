"""Limits of managed offerings, each tried: TLS alone, no CONFIG, no keys in scripts that were not declared."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.cli.check import CHECK_BY_SUBJECT
from precompute.releases.recovery import restore
from tests.integration.events.intakes import event
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night
from tests.integration.program import environment, started
from tests.integration.servers.managed import keys_of, logged, managed_server
from tests.polling import poll_until


def test_a_night_and_the_service_work_within_the_limits_of_managed_offerings(tmp_path: Path) -> None:
    night = prepare(tmp_path / "night", "redis://nowhere", users=100, items=60)
    users = sorted(histories(night))
    with managed_server(tmp_path / "redis", night.namespace) as server:
        config = replace(night, redis_url=server.url("larder-loader", "loads"))
        with logged(server) as log:
            live = publish_night(config, DATA_UNTIL)
            settings = tmp_path / "larder.toml"
            settings.write_text('[events]\nenabled = true\ndurability = "any"\n')
            environ = environment(
                config, tmp_path / "state", REDIS_URL=server.url("larder-reader", "reads"),
                LARDER_CONFIG=str(settings), LARDER_HEARTBEAT_S="0.2", LARDER_SKETCH_S="0.2",
            )  # fmt: skip
            with started(environ, tmp_path / "log") as (_, url):

                def sources(user: str) -> set[str]:
                    answer = httpx.get(f"{url}/v1/lookup/user_topk/{user}").json()
                    assert answer["generation"] == live
                    return {answer["source"]}

                assert poll_until(lambda: sources(users[0]) <= {"l1", "l2"})
                assert sources("nobody") == {"default"}
                events = {"events": [event(1), event(1), event(2)]}
                assert httpx.post(f"{url}/v1/events", json=events).json()["accepted"] == 2
                with server.client() as client:
                    client.flushall()
                assert restore(config)["generation"] == live
                assert poll_until(lambda: sources(users[1]) <= {"l1", "l2"})

        log_text = (tmp_path / "log").read_text()
        assert "Traceback" not in log_text, log_text
        with server.client() as client:
            with pytest.raises(Exception, match="unknown command"):
                client.config_get("maxmemory")
            keys_and_commands = [(keys, command) for keys, commands in log.scripts() for command in commands]
            assert {command[0].upper() for _, command in keys_and_commands} >= {
                b"GET",
                b"HGET",
                b"SET",
                b"XADD",
                b"ZADD",
            }
            for declared, command in keys_and_commands:
                assert keys_of(client, command) <= declared, command

        state, check_message = CHECK_BY_SUBJECT["redis"](config)
        assert state == "ok" and "without CONFIG" in check_message, check_message
