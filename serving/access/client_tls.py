"""TLS of our own commands that ask a service: which authority they trust, and the certificate that they show."""

import argparse
import os
import ssl

from cache.errors import ConfigError


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Options `--ca`, `--cert` and `--key` of a command that asks a service."""
    parser.add_argument(
        "--ca", metavar="FILE", default=os.environ.get("LARDER_CA"),
        help="PEM of the authority that signed the service's certificate (default: LARDER_CA, else the system's)",
    )  # fmt: skip
    parser.add_argument("--cert", metavar="FILE", help="PEM of a client certificate")
    parser.add_argument("--key", metavar="FILE", help="PEM of its key")


def context_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Context of these options, None where none was given; raises ConfigError for a file that cannot be used."""
    if not (options.ca or options.cert):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.cert:
            context.load_cert_chain(options.cert, options.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ca, --cert or --key cannot be used: {error}", field="ca") from None
    return context
