"""TLS of the service: certificate, key and client authorities, reloaded when their files change."""

import hashlib
import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.config.serving import ClientCertificates, ServingConfig
from cache.errors import ConfigError
from cache.store.artefacts import file_version

_TLS_FILE_BYTES_MAX = 1 << 20
_VERIFY_MODE_BY_SETTING = {
    "off": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED
}  # fmt: skip

FileVersions = tuple[tuple[int, int, int] | None, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of certificate, key and client authorities ("": none)."""

    certificate_path: str
    key_path: str
    client_ca_path: str = ""
    client_certificates: ClientCertificates = "off"

    @classmethod
    def of(cls, config: ServingConfig) -> "TlsFiles | None":
        """Return the files named in the settings; None if the service uses plain HTTP."""
        if not config.tls_certificate:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca, config.tls_client)

    def context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.2 and newer with these files; raise ConfigError that names an unusable file."""
        ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
        ssl_context.set_alpn_protocols(["http/1.1"])
        for path in filter(None, (self.certificate_path, self.key_path, self.client_ca_path)):
            _check_file_readable(path)
        try:
            # With an empty password it never prompts for a passphrase.
            ssl_context.load_cert_chain(self.certificate_path, self.key_path, password="")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"tls_certificate {self.certificate_path} and tls_key {self.key_path} are not a matching PEM pair "
                f"without passphrase: {error}",
                field="tls_certificate",
            ) from None
        if self.client_ca_path:
            try:
                ssl_context.load_verify_locations(self.client_ca_path)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"tls_client_ca {self.client_ca_path} holds no certificate in PEM: {error}", field="tls_client_ca"
                ) from None
            ssl_context.verify_mode = _VERIFY_MODE_BY_SETTING[self.client_certificates]
            # No session tickets: a resumed session sends no certificate, so clients of a removed authority would stay
            # accepted.
            ssl_context.options |= ssl.OP_NO_TICKET
            ssl_context.num_tickets = 0
        return ssl_context

    def content_digest(self) -> bytes:
        """Return a digest of what the files hold; b"" if one cannot be read."""
        paths = filter(None, (self.certificate_path, self.key_path, self.client_ca_path))
        try:
            return hashlib.sha256(b"\0".join(Path(path).read_bytes() for path in paths)).digest()
        except OSError:
            return b""

    def file_versions(self) -> FileVersions:
        """Return a value that changes whenever one of the files changes."""
        return tuple(file_version(Path(path)) for path in (self.certificate_path, self.key_path, self.client_ca_path))


class TlsWatch(Collector):
    """TLS context in force; changed files replace it, unless they cannot be used."""

    def __init__(self, tls_files: TlsFiles) -> None:
        """Raise ConfigError for files that cannot be used."""
        self._tls_files = tls_files
        self._loaded_version = tls_files.file_versions()
        self.context = tls_files.context()
        self._content_digest = tls_files.content_digest()
        self._is_renewed = False
        self.stale_error: str | None = None
        """Why the changed files are not applied; None: the newest ones are in force."""

    @property
    def is_stale(self) -> bool:
        """True while the files cannot be used and the previous ones stay in force."""
        return self.stale_error is not None

    def reload_if_changed(self) -> bool:
        """Read changed files, and retry those that could not be used; return whether the context was replaced."""
        version = self._tls_files.file_versions()
        if version == self._loaded_version and not self.is_stale:
            return False
        is_logged, self._loaded_version = version == self._loaded_version, version
        try:
            self.context = self._tls_files.context()
        except ConfigError as error:
            self.stale_error = error.message
            if not is_logged:
                log.error(
                    "the new TLS files are not applied, the previous certificate stays in force: %s", error.message
                )
            return False
        self.stale_error = None
        content_digest = self._tls_files.content_digest()
        self._is_renewed = self._is_renewed or content_digest != self._content_digest
        self._content_digest = content_digest
        return True

    def log_renewal(self) -> None:
        """Log that the service listens with the changed files; nothing if they hold what they held before."""
        if self._is_renewed:
            log.info("certificate %s is in force", self._tls_files.certificate_path)
        self._is_renewed = False

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauge of whether the newest certificate is in force."""
        yield GaugeMetricFamily(
            "larder_tls_stale", "1 while new TLS files cannot be used and the previous ones stay in force",
            value=float(self.is_stale),
        )  # fmt: skip


def _check_file_readable(file_path: str) -> None:
    try:
        size_bytes = Path(file_path).stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {file_path}: {error.strerror}", field="tls_certificate") from None
    if size_bytes > _TLS_FILE_BYTES_MAX:
        raise ConfigError(f"{file_path} is larger than {_TLS_FILE_BYTES_MAX:,} bytes", field="tls_certificate")
