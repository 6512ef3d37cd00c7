"""URLs of a Redis under Sentinel, and which settings take one."""

import asyncio
import traceback

import pytest
import redis
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection

from cache.config.events import EventsConfig
from cache.config.serving import ServingConfig
from cache.errors import ConfigError
from cache.l2.sentinel import PrimarySSLConnection, async_primary_pool, is_sentinel, primary_pool, read_sentinel_url

URL = "redis+sentinel://larder-reader:p%40ss@a:1,[::1]:2,c/my%2Fmaster/3?sentinel_password=q&client_name=x"


def test_a_url_names_sentinels_a_service_and_the_servers_settings() -> None:
    group, settings = read_sentinel_url(URL)

    assert is_sentinel(URL) and not is_sentinel("redis://a:1")
    assert group.sentinel_addresses == (("a", 1), ("::1", 2), ("c", 26_379))
    assert group.service_name == "my/master" and group.connection_settings == {"password": "q"}
    assert settings == {
        "username": "larder-reader", "password": "p@ss", "db": 3, "client_name": "x",
    }  # fmt: skip
    assert "q" not in repr(group).partition("settings")[2]


def test_with_tls_servers_and_sentinels_are_asked_by_the_same_options() -> None:
    url = "rediss+sentinel://u:p@a/m?ssl_ca_certs=/ca.pem&sentinel_username=s"
    group, settings = read_sentinel_url(url)

    assert group.connection_settings == {"ssl": True, "ssl_ca_certs": "/ca.pem", "username": "s"}
    assert settings == {"username": "u", "password": "p", "ssl_ca_certs": "/ca.pem"}
    assert primary_pool(url).connection_class is PrimarySSLConnection
    assert issubclass(async_primary_pool(url).connection_class, AsyncSSLConnection)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis+sentinel://u:secret@a:1", "SERVICE"),
        ("redis+sentinel://u:secret@a:1/", "SERVICE"),
        ("redis+sentinel://u:secret@a:x/m", "address 1"),
        ("redis+sentinel://u:secret@a:0/m", "address 1"),
        ("redis+sentinel://u:secret@/m", "address 1"),
        ("redis+sentinel://u:secret@a,/m", "address 2"),
        ("redis+sentinel://u:secret@a/m/x", "database number"),
        ("redis+sentinel://:x/y/cdsecret@h:26379/m", "percent-encode"),
        ("redis+sentinel://u:5/secret@h:26379", "percent-encode"),
        ("redis+sentinel://:secret/x@h:26379/m", "percent-encode"),
        ("redis+sentinel://:secret#x@h:26379/m", "percent-encode"),
        ("redis+sentinel://:secret?x@h:26379/m", "percent-encode"),
        ("redis+sentinel://:s[ecret@h/m", "percent-encode"),
        ("redis+sentinel://u:secret\u2100@h/m", "percent-encode"),
        ("redis+sentinel://u:secret@h:26379/m?socket_timeout=abc", "option"),
    ],
)
def test_a_wrong_url_is_refused_as_a_setting_without_its_password(url: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingConfig(redis_url=url)

    assert named in caught.value.message and caught.value.details["field"] == "redis_url"
    assert "ecret" not in "".join(traceback.format_exception(caught.value))


def test_sentinels_that_do_not_answer_are_named_in_one_line() -> None:
    url = "redis+sentinel://u:secret@127.0.0.1:1,127.0.0.1:2/mymaster?sentinel_password=topsecret"

    async def connect() -> None:
        await async_primary_pool(url).get_connection()

    for connecting in (lambda: primary_pool(url).get_connection(), lambda: asyncio.run(connect())):
        with pytest.raises(redis.ConnectionError) as caught:
            connecting()

        message = str(caught.value)
        assert "127.0.0.1:1, 127.0.0.1:2" in message and "'mymaster'" in message
        assert len(message) < 160 and "secret" not in message


def test_events_lie_in_a_server_that_no_failover_takes_back() -> None:
    on = EventsConfig(enabled=True)

    with pytest.raises(ConfigError, match="LARDER_EVENTS_URL"):
        ServingConfig(redis_url="redis+sentinel://a/m", events=on)
    ServingConfig(redis_url="redis+sentinel://a/m", events=on, events_url="redis://b")
    with pytest.raises(ConfigError, match="one server"):
        ServingConfig(events_url="redis+sentinel://a/m")
