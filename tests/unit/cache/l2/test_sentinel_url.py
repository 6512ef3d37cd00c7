"""URLs of a Redis under Sentinel, and which settings take one."""

import pytest
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection

from cache.config.events import EventsConfig
from cache.config.serving import ServingConfig
from cache.errors import ConfigError
from cache.l2.sentinel.primary import PrimarySSLConnection, async_pool_of, pool_of
from cache.l2.sentinel.url import is_sentinel, read_url

URL = "redis+sentinel://larder-reader:p%40ss@a:1,[::1]:2,c/my%2Fmaster/3?sentinel_password=q&client_name=x"


def test_a_url_names_sentinels_a_service_and_the_servers_settings() -> None:
    group, settings = read_url(URL)

    assert is_sentinel(URL) and not is_sentinel("redis://a:1")
    assert group.addresses == (("a", 1), ("::1", 2), ("c", 26_379))
    assert group.service == "my/master" and group.settings == {"password": "q"}
    assert settings == {
        "username": "larder-reader", "password": "p@ss", "db": 3, "client_name": "x",
    }  # fmt: skip
    assert "q" not in repr(group).partition("settings")[2]


def test_with_tls_servers_and_sentinels_are_asked_by_the_same_options() -> None:
    url = "rediss+sentinel://u:p@a/m?ssl_ca_certs=/ca.pem&sentinel_username=s"
    group, settings = read_url(url)

    assert group.settings == {"ssl": True, "ssl_ca_certs": "/ca.pem", "username": "s"}
    assert settings == {"username": "u", "password": "p", "ssl_ca_certs": "/ca.pem"}
    assert pool_of(url).connection_class is PrimarySSLConnection
    assert issubclass(async_pool_of(url).connection_class, AsyncSSLConnection)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis+sentinel://u:secret@a:1", "SERVICE"),
        ("redis+sentinel://u:secret@a:1/", "SERVICE"),
        ("redis+sentinel://u:secret@a:x/m", "'a:x'"),
        ("redis+sentinel://u:secret@a:0/m", "'a:0'"),
        ("redis+sentinel://u:secret@/m", "''"),
        ("redis+sentinel://u:secret@a,/m", "''"),
        ("redis+sentinel://u:secret@a/m/x", "'x'"),
    ],
)
def test_a_wrong_url_is_refused_as_a_setting_without_its_password(url: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingConfig(redis_url=url)

    assert named in caught.value.message and "secret" not in caught.value.message


def test_events_lie_in_a_server_that_no_failover_takes_back() -> None:
    on = EventsConfig(enabled=True)

    with pytest.raises(ConfigError, match="LARDER_EVENTS_URL"):
        ServingConfig(redis_url="redis+sentinel://a/m", events=on)
    ServingConfig(redis_url="redis+sentinel://a/m", events=on, events_url="redis://b")
    with pytest.raises(ConfigError, match="one server"):
        ServingConfig(events_url="redis+sentinel://a/m")
