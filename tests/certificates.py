"""Certificates for loopback, made new for each test."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_ALSO_LOOPBACK = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def self_signed(folder: Path) -> dict[str, str]:
    """Return Redis' TLS settings for a new certificate, without the port; clients trust `tls-ca-cert-file`."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    _openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate,
    )  # fmt: skip
    return {
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
    }


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """An authority that signs certificates of this machine and of clients."""

    folder: Path
    pair: Pair

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        """Create an authority with a key of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        pair = Pair(folder / "ca.pem", folder / "ca.key")
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN=authority {folder.name}", "-keyout", pair.key, "-out", pair.certificate,
        )  # fmt: skip
        return cls(folder, pair)

    @property
    def file(self) -> str:
        """The file that clients and servers read to trust the authority."""
        return str(self.pair.certificate)

    def signed(self, name: str, days: int = 1) -> Pair:
        """Return a certificate for loopback, valid for servers and clients; with 0 days it has expired already."""
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request_file, extension = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extension.write_text(_ALSO_LOOPBACK)
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", pair.key, "-out", request_file,
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request_file, "-CA", self.pair.certificate, "-CAkey", self.pair.key,
            "-CAcreateserial",
            "-days", str(days), "-extfile", extension, "-out", pair.certificate,
        )  # fmt: skip
        return pair


def _openssl(*arguments: str | Path) -> None:
    if subprocess.run(["openssl", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("openssl cannot make a certificate here")
