"""Checks of the service's settings: whether it starts with them, and whether its certificate is valid now."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cache.config.serving import parse_cores
from cache.errors import ConfigError
from cache.process.command_line import install_command
from serving.config.settings import ServingConfig, check_configured_files, check_header_token
from serving.config.tls import TlsFiles
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


def check_certificate_dates(config: ServingConfig) -> None:
    """Raise ConfigError for a certificate that is not valid now; the service starts with it all the same."""
    if (tls_files := TlsFiles.of(config)) is not None:
        tls_files.check_dates(tls_files.certificate(), time.time())
