"""Options behind the `?` of a Redis URL: only those that connections of redis-py take."""

import difflib
from typing import Final
from urllib.parse import parse_qsl

from cache.errors import ConfigError

CONNECTION_OPTIONS: Final = frozenset({
    "client_name", "db", "health_check_interval", "lib_name", "lib_version", "max_connections", "password", "protocol",
    "retry_on_timeout", "socket_connect_timeout", "socket_keepalive", "socket_read_size", "socket_timeout", "username",
})  # fmt: skip
"""Options of any URL."""

TLS_OPTIONS: Final = frozenset({
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers",
    "ssl_exclude_verify_flags", "ssl_include_verify_flags", "ssl_keyfile", "ssl_min_version", "ssl_password",
})  # fmt: skip
"""Options of URLs whose scheme begins with `rediss`."""

SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
"""Options of URLs that name sentinels."""


def demand_known_options(url: str, setting_name: str) -> None:
    """Raise ConfigError for an option that no connection takes, or one of TLS in a URL without it.

    The message has no part of the URL but an option's name, since a password that is not percent-encoded may extend
    into any part.
    """
    scheme, query = url.partition("://")[0], url.partition("?")[2]
    if "@" in query:
        raise ConfigError(
            f"{setting_name} has an @ behind its ?: percent-encode user name and password (? as %3F, @ as %40)",
            field=setting_name,
        )
    known_options = CONNECTION_OPTIONS
    if scheme.startswith("rediss"):
        known_options |= TLS_OPTIONS
    if scheme.endswith("sentinel"):
        known_options |= SENTINEL_OPTIONS
    for option_name, _ in parse_qsl(query, keep_blank_values=True):
        if option_name in known_options:
            continue
        if option_name in TLS_OPTIONS:
            raise ConfigError(
                f"{setting_name} has the option {option_name}, which is for TLS: begin the URL with rediss, or leave "
                "the option out",
                field=setting_name,
            )
        similar_names = difflib.get_close_matches(option_name, known_options, 1)
        names_text = ", ".join(sorted(known_options))
        remedy = f"did you mean {similar_names[0]}?" if similar_names else f"known are {names_text}"
        raise ConfigError(
            f"{setting_name} has an unknown option {option_name[:100]!r} behind its ?: {remedy}", field=setting_name
        )
