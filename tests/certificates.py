"""A certificate for this machine's loopback, made anew for each test."""

import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path) -> dict[str, str]:
    """Redis' settings for TLS with it, but for the port; `tls-ca-cert-file` is what clients trust."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("openssl cannot make a certificate here")
    return {
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
    }
