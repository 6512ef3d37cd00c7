"""A certificate is checked before it is used, and one that cannot be used never takes the place of one that can."""

import logging
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from cache.errors import ConfigError
from serving.config.settings import ServingConfig, check_configured_files
from serving.config.tls import Certificate, TlsFiles, TlsWatch
from serving.process.start_check import check_certificate_dates, check_startable
from tests.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> tuple[Pair, Pair]:
    return authority.signed("one"), authority.signed("other")


def files(pair: Pair, **more: str) -> TlsFiles:
    return TlsFiles(str(pair.certificate), str(pair.key), **more)  # type: ignore[arg-type]


@dataclass
class Clock:
    """Clock that tests move."""

    now_s: float

    def __call__(self) -> float:
        return self.now_s


def put_pair(source: Pair, target: Pair) -> None:
    """Replace both files, each by a rename."""
    for source_path, target_path in ((source.certificate, target.certificate), (source.key, target.key)):
        temporary_path = target_path.with_suffix(".new")
        temporary_path.write_bytes(source_path.read_bytes())
        temporary_path.replace(target_path)


def sample(watch: TlsWatch, name: str) -> float:
    """Return the value of a gauge."""
    (value,) = (metric.samples[0].value for metric in watch.collect() if metric.name == name)
    return float(value)


def openssl_time(pair: Pair, option: str) -> float:
    """Return a time of the certificate as openssl prints it."""
    arguments = ["openssl", "x509", "-in", str(pair.certificate), "-noout", option]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    return float(ssl.cert_time_to_seconds(printed.strip().partition("=")[2]))


def test_only_new_protocols_are_spoken(authority: Authority, pairs: tuple[Pair, Pair]) -> None:
    ssl_context = files(pairs[0], client_ca_path=authority.file, client_certificates="required").context()

    assert ssl_context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert ssl_context.verify_mode is ssl.CERT_REQUIRED and ssl_context.num_tickets == 0
    assert files(pairs[0]).context().verify_mode is ssl.CERT_NONE


def test_what_is_no_pair_is_refused_with_both_names(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    first_pair, second_pair = pairs
    with pytest.raises(
        ConfigError, match=f"{first_pair.certificate} and tls_key {second_pair.key} are not a matching PEM pair"
    ):
        files(Pair(first_pair.certificate, second_pair.key)).context()
    with pytest.raises(ConfigError, match=r"cannot read .*none\.pem: No such file"):
        files(Pair(tmp_path / "none.pem", first_pair.key)).context()
    (tmp_path / "long.pem").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        files(Pair(first_pair.certificate, tmp_path / "long.pem")).context()
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="holds no certificate"):
        files(first_pair, client_ca_path=str(tmp_path / "empty.pem"), client_certificates="optional").context()


def test_the_file_of_a_pair_that_cannot_be_used_is_named(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    pair = pairs[0]
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    encrypted = tmp_path / "encrypted.key"
    for arguments in (["-aes256"], ["-aes256", "-traditional"]):
        command = ["openssl", "pkey", "-in", str(pair.key), *arguments, "-passout", "pass:x", "-out", str(encrypted)]
        subprocess.run(command, check=True)
        with pytest.raises(ConfigError, match=f"^tls_key {encrypted} needs a passphrase"):
            files(Pair(pair.certificate, encrypted)).context()

    with pytest.raises(ConfigError, match=f"^tls_certificate {no_pem} holds no certificate in PEM"):
        files(Pair(no_pem, pair.key)).context()
    with pytest.raises(ConfigError, match=f"^tls_key {no_pem} holds no private key in PEM"):
        files(Pair(pair.certificate, no_pem)).context()


@pytest.mark.parametrize(("changes", "error_pattern"), [
    ({"tls_certificate": "a"}, "go together"), ({"tls_key": "a"}, "go together"),
    ({"tls_client": "required"}, "go together"), ({"tls_client_ca": "a"}, "go together"),
    ({"tls_client_ca": "a", "tls_client": "optional"}, "needs tls_certificate"),
])  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, str], error_pattern: str) -> None:
    with pytest.raises(ConfigError, match=error_pattern):
        ServingConfig(**changes)  # type: ignore[arg-type]


def test_files_are_checked_before_anything_starts(tmp_path: Path, pairs: tuple[Pair, Pair]) -> None:
    good = {"tls_certificate": str(pairs[0].certificate), "tls_key": str(pairs[0].key)}
    check_configured_files(ServingConfig(**good))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a matching PEM pair"):
        check_configured_files(ServingConfig(**good | {"tls_key": str(pairs[1].key)}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens add"):
        check_configured_files(ServingConfig(tokens_file=str(tmp_path / "none")))


def test_a_new_pair_is_taken_up_and_a_broken_one_is_not(
    tmp_path: Path, pairs: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    watched_pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")

    def put(certificate: Path, key: Path) -> None:
        for source, target in ((certificate, watched_pair.certificate), (key, watched_pair.key)):
            temporary_path = target.with_suffix(".new")
            temporary_path.write_bytes(source.read_bytes())
            temporary_path.replace(target)

    put(pairs[0].certificate, pairs[0].key)
    watch = TlsWatch(files(watched_pair))
    first = watch.context
    assert not watch.reload_if_changed() and watch.context is first

    put(pairs[1].certificate, pairs[0].key)  # half of the change: the key follows
    with caplog.at_level(logging.ERROR):
        assert not watch.reload_if_changed() and not watch.reload_if_changed()
    assert watch.context is first and watch.is_stale and len(caplog.records) == 1
    assert sample(watch, "larder_tls_stale") == 1.0

    put(pairs[1].certificate, pairs[1].key)
    assert watch.reload_if_changed() and watch.context is not first and not watch.is_stale


def test_a_renewal_is_logged_only_if_the_files_hold_something_else(
    tmp_path: Path, pairs: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    watched_pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")

    def put(pair: Pair) -> None:
        for source, target in ((pair.certificate, watched_pair.certificate), (pair.key, watched_pair.key)):
            target.with_suffix(".new").write_bytes(source.read_bytes())
            target.with_suffix(".new").replace(target)

    put(pairs[0])
    watch = TlsWatch(files(watched_pair))
    with caplog.at_level(logging.INFO):
        put(pairs[0])  # the same certificate, written again
        assert watch.reload_if_changed()
        watch.log_renewal()
        assert caplog.records == []
        put(pairs[1])
        assert watch.reload_if_changed()
        watch.log_renewal()
    assert [record.getMessage() for record in caplog.records] == [f"certificate {watched_pair.certificate} is in force"]


def test_a_pair_that_becomes_readable_without_a_change_is_taken_up(
    pairs: tuple[Pair, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a changed pair that the service may not read
    watched_pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")
    for source_pair in pairs:
        watched_pair.certificate.write_bytes(source_pair.certificate.read_bytes())
        watched_pair.key.write_bytes(source_pair.key.read_bytes())
        if source_pair is pairs[0]:
            watch = TlsWatch(files(watched_pair))

    def refuse(_: TlsFiles) -> NoReturn:
        raise ConfigError("cannot read tls.key: Permission denied", field="tls_key")

    with monkeypatch.context() as patch:
        patch.setattr(TlsFiles, "context", refuse)
        assert not watch.reload_if_changed() and watch.is_stale

    # When it may read the pair, whose modification times have not changed
    # Then the pair is in force
    assert watch.reload_if_changed() and not watch.is_stale


@pytest.mark.parametrize("days", [1, 20_000])  # the years from 2050 on are written in another form
def test_the_times_of_a_certificate_are_those_that_openssl_prints(authority: Authority, days: int) -> None:
    pair = authority.signed(f"times{days}", days=days)
    # Given a file with text before the certificate, and its authority behind it
    with_chain = pair.certificate.with_suffix(".chain")
    with_chain.write_text("subject=CN = a\n" + pair.certificate.read_text() + authority.pair.certificate.read_text())

    for certificate_path in (pair.certificate, with_chain):
        certificate = files(Pair(certificate_path, pair.key)).certificate()

        assert certificate.valid_from_s == openssl_time(pair, "-startdate")
        assert certificate.expires_at_s == openssl_time(pair, "-enddate")


def test_times_that_cannot_be_read_are_no_reason_to_refuse_a_certificate() -> None:
    for pem in ("nothing", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        assert Certificate.from_pem(pem).validity_error(time.time()) is None


def test_an_expired_pair_does_not_replace_one_that_is_valid(
    authority: Authority, pairs: tuple[Pair, Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a valid pair in force, and client authorities, whose certificates the service asks for
    watched_pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")
    put_pair(pairs[0], watched_pair)
    watch = TlsWatch(files(watched_pair, client_ca_path=authority.file, client_certificates="required"))
    valid_context = watch.context

    # When the files become a pair that fits together and has expired
    put_pair(authority.signed("expired", days=0), watched_pair)

    # Then the valid one stays in force, which log, gauge and heartbeat say
    with caplog.at_level(logging.ERROR):
        assert not watch.reload_if_changed() and not watch.reload_if_changed()
    assert watch.context is valid_context and watch.is_stale and sample(watch, "larder_tls_stale") == 1.0
    (record,) = caplog.records
    assert f"tls_certificate {watched_pair.certificate} expired at 20" in record.getMessage()
    assert "put a renewed certificate and its key in place" in record.getMessage()
    assert watch.problem is not None and watch.problem in record.getMessage()
    assert sample(watch, "larder_tls_expires_at_seconds") == openssl_time(pairs[0], "-enddate")

    # And a valid pair ends it
    put_pair(pairs[1], watched_pair)
    assert watch.reload_if_changed() and not watch.is_stale and watch.problem is None
    assert sample(watch, "larder_tls_expires_at_seconds") == openssl_time(pairs[1], "-enddate")


def test_a_pair_that_is_not_valid_yet_is_applied_once_it_is(
    authority: Authority, pairs: tuple[Pair, Pair], tmp_path: Path
) -> None:
    # Given a pair in force, by a clock that is behind the first second of the next one
    watched_pair, clock = Pair(tmp_path / "tls.pem", tmp_path / "tls.key"), Clock(time.time())
    put_pair(pairs[0], watched_pair)
    next_pair = authority.signed("next", days=9)
    starts_at_s = openssl_time(next_pair, "-startdate")
    clock.now_s = starts_at_s - 1
    watch = TlsWatch(files(watched_pair), clock)

    # When the files change
    put_pair(next_pair, watched_pair)

    # Then the pair waits until it is valid, and no change of the files is needed
    assert not watch.reload_if_changed() and watch.is_stale
    assert watch.stale_error is not None and "is not valid before" in watch.stale_error
    assert "clock" in watch.stale_error
    clock.now_s = starts_at_s
    assert watch.reload_if_changed() and not watch.is_stale and watch.problem is None


def test_a_service_starts_with_an_expired_pair_and_says_so_until_a_valid_one_comes(
    authority: Authority, pairs: tuple[Pair, Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an expired pair, with which the service may start
    watched_pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")
    put_pair(authority.signed("old", days=0), watched_pair)
    config = ServingConfig(tls_certificate=str(watched_pair.certificate), tls_key=str(watched_pair.key))
    check_startable(config)

    # When it starts
    with caplog.at_level(logging.ERROR):
        watch = TlsWatch(files(watched_pair))
        assert not watch.reload_if_changed()

    # Then one line and the heartbeat say so, and so does the check
    (record,) = caplog.records
    assert watch.problem is not None and watch.problem in record.getMessage() and "expired at" in watch.problem
    assert not watch.is_stale
    with pytest.raises(ConfigError, match=r"tls\.pem expired at .*: put a renewed certificate"):
        check_certificate_dates(config)

    # And another expired pair changes nothing
    expired_context = watch.context
    put_pair(authority.signed("also-old", days=0), watched_pair)
    assert not watch.reload_if_changed() and watch.context is expired_context and watch.is_stale
    assert watch.problem.count("expired at") == 2

    # And a valid one ends it
    put_pair(pairs[0], watched_pair)
    assert watch.reload_if_changed() and watch.problem is None
    check_certificate_dates(config)


def test_a_certificate_that_expires_while_in_force_is_a_problem_from_then_on(
    pairs: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a certificate in force
    expires_at_s = openssl_time(pairs[0], "-enddate")
    clock = Clock(expires_at_s)
    watch = TlsWatch(files(pairs[0]), clock)
    assert not watch.reload_if_changed() and watch.problem is None

    # When its last second is over
    clock.now_s = expires_at_s + 1
    with caplog.at_level(logging.ERROR):
        assert not watch.reload_if_changed() and not watch.reload_if_changed()

    # Then it stays in force, with a problem and one line in the log
    assert watch.problem is not None and "expired at" in watch.problem and not watch.is_stale
    assert [watch.problem in record.getMessage() for record in caplog.records] == [True]


def test_an_authority_is_removed_although_the_certificate_in_force_has_expired(
    authority: Authority, tmp_path: Path
) -> None:
    # Given an expired certificate in force, and two client authorities
    client_ca = tmp_path / "clients.pem"
    client_ca.write_text(authority.pair.certificate.read_text() * 2)
    expired_files = files(
        authority.signed("same", days=0), client_ca_path=str(client_ca), client_certificates="required"
    )
    watch = TlsWatch(expired_files)
    first_context = watch.context

    # When one authority leaves the file
    client_ca.write_text(authority.pair.certificate.read_text())

    # Then new connections no longer accept it: the certificate is the one in force
    assert watch.reload_if_changed() and watch.context is not first_context and not watch.is_stale
