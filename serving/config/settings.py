"""Settings of the service as its parts take them; their model is `cache.config.serving`."""

from cache.config.serving import Precision, ServingConfig
from cache.errors import ConfigError
from serving.requests.models import Limits

__all__ = ["Precision", "ServingConfig", "check_token", "limits_of"]


def limits_of(config: ServingConfig) -> Limits:
    """Limits on what one request may hold."""
    return Limits(
        config.max_batch,
        config.max_history,
        config.max_exclude,
        config.deadline_ms,
        config.deadline_max_ms,
        config.max_ids,
        config.max_numbers,
    )


def check_token(token: str) -> None:
    """Raises ConfigError for a token that no header can carry as it is."""
    if not token.isprintable() or any(each.isspace() for each in token):
        raise ConfigError(
            "a token is printable characters without spaces; without any, leave LARDER_TOKEN unset",
            field="token",
        )
