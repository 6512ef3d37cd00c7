"""Options behind the `?` of a Redis URL."""

import inspect

import pytest
import redis.asyncio.connection
import redis.connection

from cache.config.shared import SharedConfig
from cache.errors import ConfigError
from cache.l2.url_options import CONNECTION_OPTIONS, TLS_OPTIONS, demand_known_options


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0", "redis://u:p%40ss@h/0?socket_timeout=2&client_name=shop", "unix:///tmp/r.sock?db=1",
        "rediss://u:p@h:1/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=false", "rediss+cluster://a:1,b:2?ssl_keyfile=/k",
        "rediss+sentinel://a:1/main?sentinel_password=x&ssl_ca_certs=/ca.pem",
    ],
)  # fmt: skip
def test_known_options_are_accepted(url: str) -> None:
    demand_known_options(url, "redis_url")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("rediss://h:1/0?ssl_ca_cert=/x.pem", "unknown option 'ssl_ca_cert' behind its ?: did you mean ssl_ca_certs?"),
        ("redis://h:1/0?zzz", "unknown option 'zzz' behind its ?: known are client_name, db, "),
        ("redis://h:1/0?ssl_ca_certs=/x.pem", "option ssl_ca_certs, which is for TLS: begin the URL with rediss"),
        ("redis://h:1/0?sentinel_password=secret", "unknown option 'sentinel_password'"),
        ("redis://u:secret?more@h:1/0", "percent-encode user name and password (? as %3F"),
    ],
)
@pytest.mark.parametrize("setting_name", ["redis_url", "events_url"])
def test_an_unknown_option_is_named_with_the_setting_and_no_value(setting_name: str, url: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SharedConfig(**{setting_name: url})  # type: ignore[arg-type]

    message = refusal.value.message
    assert message.startswith(setting_name) and told in message
    assert "secret" not in message and "more" not in message


def test_redis_py_takes_every_known_option() -> None:
    for module in (redis.connection, redis.asyncio.connection):
        taken_by_pool = set(inspect.signature(module.ConnectionPool.__init__).parameters)
        taken = set(inspect.signature(module.AbstractConnection.__init__).parameters)
        taken |= set(inspect.signature(module.Connection.__init__).parameters)
        taken_with_tls = set(inspect.signature(module.SSLConnection.__init__).parameters)
        assert taken | taken_by_pool >= CONNECTION_OPTIONS
        assert taken_with_tls >= TLS_OPTIONS
