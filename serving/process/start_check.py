"""Check of the settings with which the service does not start, by `larder serve` and `larder check`."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cache.config.serving import parse_cores
from cache.errors import ConfigError
from cache.process.command_line import install_command
from serving.config.settings import ServingConfig, check_configured_files, check_header_token
from serving.process.resources import check_cores

_TRACES_DISTRIBUTION: Final = "opentelemetry-exporter-otlp-proto-http"


def check_startable(config: ServingConfig) -> None:
    """Raise ConfigError for settings, or files that they name, with which `larder serve` does not start."""
    config.require_guard()
    check_header_token(config.token)
    check_configured_files(config)
    check_cores(parse_cores(config.live_cores))
    if config.traces:
        try:
            version(_TRACES_DISTRIBUTION)  # find_spec of its module would import its parents
        except PackageNotFoundError:
            raise ConfigError(
                f"LARDER_TRACES needs {_TRACES_DISTRIBUTION}, which is not installed here: {install_command('otel')}",
                field="traces",
            ) from None
