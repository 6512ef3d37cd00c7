"""TLS of the service: certificate, key and client authorities, reloaded when their files change."""

import base64
import hashlib
import logging
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.config.serving import ClientCertificates, ServingConfig
from cache.errors import ConfigError
from cache.store.artefacts import file_version

_TLS_FILE_BYTES_MAX = 1 << 20
_VERIFY_MODE_BY_SETTING = {
    "off": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED
}  # fmt: skip

_PEM_CERTIFICATE_PATTERN: Final = re.compile(
    r"-----BEGIN ((?:X509 |TRUSTED )?CERTIFICATE)-----(.*?)-----END \1-----", re.DOTALL
)
_PEM_KEY_PATTERN: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s*Proc-Type: 4,ENCRYPTED)?")
_EXPLICIT_VERSION_TAG: Final = 0xA0
_UTC_TIME_TAG: Final = 0x17

FileVersions = tuple[tuple[int, int, int] | None, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate of the service (DER), with the first and the last second in which it is valid (Unix seconds)."""

    der: bytes
    valid_from_s: float
    expires_at_s: float

    @classmethod
    def from_pem(cls, pem: str) -> "Certificate":
        """Return the first certificate, the one that OpenSSL sends for the key; the rest of a file are its issuers.

        Times that cannot be read have no limits: OpenSSL judges whether the file holds a certificate.
        """
        pem_block = _PEM_CERTIFICATE_PATTERN.search(pem)
        try:
            der = b"" if pem_block is None else base64.b64decode(pem_block[2])
            return cls(der, *_read_validity(der))
        except (ValueError, IndexError):
            return cls(b"", -math.inf, math.inf)

    def validity_error(self, now_s: float) -> str | None:
        """Return why the certificate is not valid at this time, and the remedy, to follow its name; None if it is."""
        if now_s > self.expires_at_s:
            return f"expired at {_utc_text(self.expires_at_s)}: put a renewed certificate and its key in place"
        if now_s < self.valid_from_s:
            return (
                f"is not valid before {_utc_text(self.valid_from_s)}: set this host's clock right, or put a "
                "certificate and its key in place that are valid now"
            )
        return None


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
            raise self._pair_error(error) from None
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

    def _pair_error(self, error: Exception) -> ConfigError:
        """Return the error for a certificate and a key that OpenSSL refused; it names the file that is to blame."""
        if not self.certificate().der:
            return ConfigError(
                f"tls_certificate {self.certificate_path} holds no certificate in PEM", field="tls_certificate"
            )
        key_header = _PEM_KEY_PATTERN.search(Path(self.key_path).read_bytes())
        if key_header is None:
            return ConfigError(f"tls_key {self.key_path} holds no private key in PEM", field="tls_key")
        if b"ENCRYPTED" in key_header[0]:
            return ConfigError(
                f"tls_key {self.key_path} needs a passphrase: remove it, with "
                f"`openssl pkey -in {self.key_path} -out NEW`",
                field="tls_key",
            )
        return ConfigError(
            f"tls_certificate {self.certificate_path} and tls_key {self.key_path} are not a matching PEM pair "
            f"without passphrase: {error}",
            field="tls_certificate",
        )

    def certificate(self) -> Certificate:
        """Read the certificate with its times; raise ConfigError if the file cannot be read."""
        _check_file_readable(self.certificate_path)
        try:
            return Certificate.from_pem(Path(self.certificate_path).read_text(encoding="ascii", errors="replace"))
        except OSError as error:
            raise ConfigError(
                f"cannot read {self.certificate_path}: {error.strerror}", field="tls_certificate"
            ) from None

    def check_dates(self, certificate: Certificate, now_s: float) -> None:
        """Raise ConfigError if the certificate, which is that of the files, is not valid at this time."""
        if (validity_error := certificate.validity_error(now_s)) is not None:
            raise ConfigError(f"tls_certificate {self.certificate_path} {validity_error}", field="tls_certificate")

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
    """TLS context in force; changed files replace it, unless they cannot be used or their certificate is not valid."""

    def __init__(self, tls_files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        """Raise ConfigError for files that cannot be used; a certificate that is not valid now is only a problem."""
        self._tls_files = tls_files
        self._clock = clock
        self._loaded_version = tls_files.file_versions()
        self.context = tls_files.context()
        self._certificate = tls_files.certificate()
        self._logged_certificate: Certificate | None = None
        self._content_digest = tls_files.content_digest()
        self._is_renewed = False
        self.stale_error: str | None = None
        """Why the changed files are not applied; None: the newest ones are in force."""
        self._log_invalid_certificate()

    @property
    def is_stale(self) -> bool:
        """True while the files cannot be used and the previous ones stay in force."""
        return self.stale_error is not None

    @property
    def problem(self) -> str | None:
        """What is wrong with the certificate in force and with the changed files; None if all is well."""
        validity_error = self._certificate.validity_error(self._clock())
        in_force_text = validity_error and self._in_force_text(validity_error)
        return "; ".join(filter(None, (in_force_text, self.stale_error))) or None

    def reload_if_changed(self) -> bool:
        """Read changed files, and retry those that could not be used; return whether the context was replaced.

        A certificate in force that is not valid is logged, once.
        """
        is_replaced = self._reload_if_changed()
        self._log_invalid_certificate()
        return is_replaced

    def _reload_if_changed(self) -> bool:
        version = self._tls_files.file_versions()
        if version == self._loaded_version and not self.is_stale:
            return False
        is_logged, self._loaded_version = version == self._loaded_version, version
        try:
            context, certificate = self._tls_files.context(), self._tls_files.certificate()
            if certificate != self._certificate:  # with the same one, changed client authorities apply in any case
                self._tls_files.check_dates(certificate, self._clock())
        except ConfigError as error:
            self.stale_error = error.message
            if not is_logged:
                log.error(
                    "the new TLS files are not applied, the previous certificate stays in force: %s", error.message
                )
            return False
        self.context, self._certificate = context, certificate
        self.stale_error = None
        content_digest = self._tls_files.content_digest()
        self._is_renewed = self._is_renewed or content_digest != self._content_digest
        self._content_digest = content_digest
        return True

    def _log_invalid_certificate(self) -> None:
        validity_error = self._certificate.validity_error(self._clock())
        if validity_error is not None and self._logged_certificate != self._certificate:
            self._logged_certificate = self._certificate
            log.error("%s; callers that verify it refuse it", self._in_force_text(validity_error))

    def _in_force_text(self, validity_error: str) -> str:
        return f"the certificate in force, of tls_certificate {self._tls_files.certificate_path}, {validity_error}"

    def log_renewal(self) -> None:
        """Log that the service listens with the changed files; nothing if they hold what they held before."""
        if self._is_renewed:
            log.info("certificate %s is in force", self._tls_files.certificate_path)
        self._is_renewed = False

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauges of whether the newest certificate is in force, and of when that in force expires."""
        yield GaugeMetricFamily(
            "larder_tls_stale", "1 while new TLS files cannot be used and the previous ones stay in force",
            value=float(self.is_stale),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "larder_tls_expires_at_seconds", "Unix time at which the certificate in force expires",
            value=self._certificate.expires_at_s,
        )  # fmt: skip


def _check_file_readable(file_path: str) -> None:
    try:
        size_bytes = Path(file_path).stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {file_path}: {error.strerror}", field="tls_certificate") from None
    if size_bytes > _TLS_FILE_BYTES_MAX:
        raise ConfigError(f"{file_path} is larger than {_TLS_FILE_BYTES_MAX:,} bytes", field="tls_certificate")


def _read_validity(der: bytes) -> tuple[float, float]:
    """Return notBefore and notAfter of a certificate (RFC 5280, section 4.1); raise ValueError or IndexError."""
    _, offset, _ = _read_der_header(der, 0)  # Certificate
    _, offset, _ = _read_der_header(der, offset)  # TBSCertificate
    tag, _, end = _read_der_header(der, offset)
    if tag == _EXPLICIT_VERSION_TAG:
        offset = end
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, offset = _read_der_header(der, offset)
    _, offset, _ = _read_der_header(der, offset)  # Validity
    first_tag, first_start, first_end = _read_der_header(der, offset)
    last_tag, last_start, last_end = _read_der_header(der, first_end)
    return _parse_time(first_tag, der[first_start:first_end]), _parse_time(last_tag, der[last_start:last_end])


def _read_der_header(der: bytes, offset: int) -> tuple[int, int, int]:
    """Return tag, start and end of the content of the element at this offset."""
    tag, length, start = der[offset], der[offset + 1], offset + 2
    if length & 0x80:
        length_bytes = length & 0x7F
        length = int.from_bytes(der[start : start + length_bytes])
        start += length_bytes
    return tag, start, start + length


def _parse_time(tag: int, content: bytes) -> float:
    """Return the Unix seconds of a UTCTime, whose years are 1950 to 2049, or GeneralizedTime."""
    time_text = content.decode("ascii")
    if tag == _UTC_TIME_TAG:
        time_text = ("19" if time_text >= "50" else "20") + time_text
    return datetime.strptime(time_text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _utc_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
