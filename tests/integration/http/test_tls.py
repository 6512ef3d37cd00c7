"""The service speaks TLS itself, takes up new certificates while it runs, and may want one of its callers."""

import os
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from precompute.config.settings import NightConfig
from serving.client import Client, Unreachable
from tests.certificates import Authority, Pair
from tests.integration.nights import build_night, histories
from tests.integration.program import ROOT, environment, started
from tests.polling import poll_until

TOKEN = "sesame-sesame"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=60, items=40)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ca"))


@dataclass
class TlsFiles:
    """Where the service reads its certificate, key and authorities."""

    folder: Path

    def put(self, pair: Pair, authority: Authority | None = None) -> None:
        """Replaces the files, the certificate first."""
        files = [(pair.certificate, "tls.pem"), (pair.key, "tls.key")]
        if authority is not None:
            files.insert(0, (authority.pair.certificate, "clients.pem"))
        for source, name in files:
            temporary_path = self.folder / f".{name}"
            temporary_path.write_bytes(source.read_bytes())
            temporary_path.replace(self.folder / name)

    def settings(self, **more: str) -> dict[str, str]:
        """What names them."""
        return {
            "LARDER_TLS_CERTIFICATE": str(self.folder / "tls.pem"),
            "LARDER_TLS_KEY": str(self.folder / "tls.key"),
            "LARDER_TOKEN": TOKEN,
            "LARDER_HEAD_TIMEOUT_S": "1",
            "LARDER_IDLE_TIMEOUT_S": "60",
        } | more


def settings(night: NightConfig, tls_files: TlsFiles, **more: str) -> dict[str, str]:
    state = tls_files.folder / "state"
    return environment(night, state, REDIS_URL=str(night.redis_url), **tls_files.settings(**more))


def path_of(night: NightConfig) -> str:
    return f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"


def fetch_certificate(url: str, trusted: str) -> bytes:
    """The certificate that a new connection is shown."""
    parts = urlsplit(url)
    context = ssl.create_default_context(cafile=trusted)
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=5) as tcp_socket,
        context.wrap_socket(tcp_socket, server_hostname="127.0.0.1") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


def context(trusted: Authority, client_pair: Pair | None = None) -> ssl.SSLContext:
    ssl_context = ssl.create_default_context(cafile=trusted.file)
    if client_pair is not None:
        ssl_context.load_cert_chain(client_pair.certificate, client_pair.key)
    return ssl_context


@pytest.mark.parametrize(("fast", "workers"), [("on", "1"), ("off", "1"), ("on", "2")])
def test_everything_speaks_tls_and_a_new_certificate_drops_no_connection(
    night: NightConfig, authority: Authority, tmp_path: Path, fast: str, workers: str
) -> None:
    first, second, stranger = (authority.signed(f"{fast}{workers}{suffix}") for suffix in "abc")
    tls_files, path = TlsFiles(tmp_path), path_of(night)
    tls_files.put(first)
    environ = settings(night, tls_files, LARDER_FAST_HTTP=fast, LARDER_WORKERS=workers)
    with started(environ, tmp_path / "log") as (_, url):
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=context(authority), headers=HEADERS, http2=False) as caller:
            responses = [caller.get(url + path) for _ in range(4)]
            assert {response.status_code for response in responses} == {200}
            posted = caller.post(f"{url}/v1/lookup/user_topk", json={"entities": ["a"] * 200})
            assert posted.status_code == 200 and len(posted.json()["answers"]) == 200
            assert fetch_certificate(url, authority.file) == der(first)

            tls_files.put(second)

            assert poll_until(lambda: in_force(tmp_path / "log") == int(workers), 15)
            assert {fetch_certificate(url, authority.file) for _ in range(8)} == {der(second)}
            later_response = caller.get(url + path)
            assert later_response.status_code == 200
            wrapped = later_response.extensions["network_stream"].get_extra_info("ssl_object")
            assert wrapped.getpeercert(True) == der(first)  # the very connection from before

            tls_files.put(Pair(stranger.certificate, first.key))  # no pair
            stale = "larder_tls_stale"
            assert poll_until(lambda: all_of(caller.get(f"{url}/metrics").text, stale) == {1.0}, 15)
            assert {fetch_certificate(url, authority.file) for _ in range(4)} == {der(second)}
            tls_files.put(stranger)
            assert poll_until(lambda: in_force(tmp_path / "log") == 2 * int(workers), 15)
            assert {fetch_certificate(url, authority.file) for _ in range(8)} == {der(stranger)}
        plain_is_refused(url)
        if workers == "1":
            asked_by_our_own(url, night, authority)
    log = (tmp_path / "log").read_text()
    assert log.count("previous certificate stays in force") == int(workers) and "PRIVATE" not in log


def in_force(log: Path) -> int:
    """How often a worker took new files; the kernel, not we, says which worker a connection reaches."""
    return log.read_text().count(" is in force")


def all_of(text: str, name: str) -> set[float]:
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return {float(line.rpartition(" ")[2]) for line in lines}


def plain_is_refused(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/healthz")


def asked_by_our_own(url: str, night: NightConfig, authority: Authority) -> None:
    """The Python client and the commands that ask a service."""
    user = min(histories(night))
    with Client(url, token=TOKEN, verify=authority.file) as client:
        assert client.lookup("user_topk", user).items
    with Client(url, token=TOKEN) as client, pytest.raises(Unreachable):
        client.lookup("user_topk", user)
    for arguments, trust in (
        (["top", "--once"], {"LARDER_CA": authority.file}),
        (["explain", "user_topk", user, "--ca", authority.file], {}),
    ):
        completed_process = command([*arguments, "--url", url, "--token", TOKEN], **trust)
        assert completed_process.returncode == 0, completed_process.stderr
        assert command([*arguments[:3], "--url", url]).returncode != 0


def command(arguments: list[str], **more: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: setting for name, setting in os.environ.items() if not name.startswith("LARDER_")}
    return subprocess.run(
        [sys.executable, "-m", "serving", *arguments], env=environ | {"PYTHONPATH": str(ROOT)} | more,
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("client", ["required", "optional"])
def test_callers_show_certificates_of_the_authorities_in_force(
    night: NightConfig, authority: Authority, tmp_path: Path, client: str
) -> None:
    first_authority, second_authority = (Authority.create(tmp_path / name) for name in ("ours", "others"))
    first_pair, second_pair = first_authority.signed("one"), second_authority.signed("other")
    tls_files, path = TlsFiles(tmp_path), path_of(night)
    tls_files.put(authority.signed(f"server-{client}"), first_authority)
    ca = str(tmp_path / "clients.pem")
    environ = settings(night, tls_files, LARDER_TLS_CLIENT=client, LARDER_TLS_CLIENT_CA=ca)
    with started(environ, tmp_path / "log") as (_, url):

        def is_answered(client_pair: Pair | None) -> bool:
            try:
                trusting = context(authority, client_pair)
                return httpx.get(url + path, headers=HEADERS, verify=trusting).status_code == 200
            except httpx.TransportError:
                return False

        assert is_answered(first_pair) and not is_answered(second_pair)
        assert is_answered(None) == (client == "optional")
        # A client certificate does not replace a token.
        assert httpx.get(url + path, verify=context(authority, first_pair)).status_code == 401
        tls_files.put(authority.signed("renewed"), second_authority)
        assert poll_until(lambda: is_answered(second_pair), 15)
        assert not is_answered(first_pair)


def test_who_never_shakes_hands_is_ended(night: NightConfig, authority: Authority, tmp_path: Path) -> None:
    tls_files = TlsFiles(tmp_path)
    tls_files.put(authority.signed("silent"))
    with started(settings(night, tls_files), tmp_path / "log") as (_, url):
        parts = urlsplit(url)
        peers = [socket.create_connection((parts.hostname, parts.port), timeout=20) for _ in range(20)]  # fmt: skip
        peers[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        for peer in peers:
            while peer.recv(100):
                pass
            peer.close()
        trusting = context(authority)
        assert httpx.get(f"{url}/healthz", verify=trusting).status_code == 200


def test_a_pair_that_does_not_match_is_reported_before_anything_starts(
    night: NightConfig, authority: Authority, tmp_path: Path
) -> None:
    first_pair, second_pair = authority.signed("start-a"), authority.signed("start-b")
    tls_files = TlsFiles(tmp_path)
    tls_files.put(Pair(first_pair.certificate, second_pair.key))

    completed_process = subprocess.run(
        [sys.executable, "-m", "serving", "--port", "0"], env=settings(night, tls_files), cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (
        completed_process.returncode == 2
        and "are not a matching PEM pair" in completed_process.stderr
        and str(tmp_path) in completed_process.stderr
    )
    assert completed_process.stderr.count("\n") == 1 and completed_process.stdout == ""
