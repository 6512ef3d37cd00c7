"""A certificate is checked before it is used, and one that cannot be used never takes the place of one that can."""

import logging
import ssl
from pathlib import Path
from typing import NoReturn

import pytest

from cache.errors import ConfigError
from serving.config.settings import ServingConfig, check_configured_files
from serving.config.tls import TlsFiles, TlsWatch
from tests.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> tuple[Pair, Pair]:
    return authority.signed("one"), authority.signed("other")


def files(pair: Pair, **more: str) -> TlsFiles:
    return TlsFiles(str(pair.certificate), str(pair.key), **more)  # type: ignore[arg-type]


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
    assert [metric.samples[0].value for metric in watch.collect()] == [1.0]

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
