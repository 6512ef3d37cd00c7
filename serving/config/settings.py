"""Checks of the service's settings, and request limits derived from them; the model is `cache.config.serving`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cache.config.serving import ServingConfig
from cache.errors import ConfigError, InvalidInput
from cache.filters.reranking import Reranking, read_reranking
from serving.access.callers import TOKEN_BYTES_MAX
from serving.access.token_file import read_tokens
from serving.config.tls import TlsFiles
from serving.requests.options import Limits

_BOOST_FACTOR_MAX: Final = 1_000.0

__all__ = ["ServingConfig", "check_configured_files", "check_header_token", "request_limits"]


def request_limits(config: ServingConfig) -> Limits:
    """Return the limits of one request; raise ConfigError for an invalid declared re-ranking."""
    return Limits(
        config.max_batch,
        config.max_history,
        config.max_exclude,
        config.deadline_ms,
        config.deadline_max_ms,
        config.max_ids,
        config.max_numbers,
        config.boost_max,
        {
            reranking_name: _read_declared_reranking(reranking_name, declaration)
            for reranking_name, declaration in config.rerank.items()
        },
        config.feature_text_bytes,
    )


def _read_declared_reranking(reranking_name: str, reranking_declaration: Mapping[str, Any]) -> Reranking:
    try:
        return read_reranking(reranking_declaration, _BOOST_FACTOR_MAX)
    except InvalidInput as error:
        inner_field = error.details.get("field")
        setting_name = f"rerank.{reranking_name}" if inner_field is None else f"rerank.{reranking_name}.{inner_field}"
        raise ConfigError(f"[serving.{setting_name}]: {error.message}", field="rerank") from error


def check_header_token(token: str) -> None:
    """Raise ConfigError for a token that cannot be sent unchanged in a header."""
    if len(token.encode()) > TOKEN_BYTES_MAX:
        raise ConfigError(f"a token has at most {TOKEN_BYTES_MAX:,} bytes", field="token")
    if not token.isprintable() or any(character.isspace() for character in token):
        raise ConfigError(
            "a token must be printable characters without spaces; to use no token, leave LARDER_TOKEN unset",
            field="token",
        )


def check_configured_files(config: ServingConfig) -> None:
    """Raise ConfigError for files or re-rankings that workers could not use; called before workers start."""
    if config.tokens_file:
        read_tokens(Path(config.tokens_file))
    if (tls_files := TlsFiles.of(config)) is not None:
        tls_files.context()
    request_limits(config)
