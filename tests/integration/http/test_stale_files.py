"""Tokens file and TLS pair that cannot be used: the dashboard says so, and `larder check` before anything starts."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from cache.process.redis_server import RedisServer
from infra.cli import check
from precompute.cli.status import read_state, report_status
from serving.access.token_file import write_tokens
from serving.config.settings import ServingConfig, check_configured_files
from tests.certificates import Authority
from tests.integration.nights import build_night
from tests.integration.serving_app import eventually, serving


async def test_changed_files_that_cannot_be_used_are_in_the_verdict_until_they_can(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # given a service with tokens and a certificate
    night = build_night(tmp_path / "night", own_redis.url)
    pair = Authority.create(tmp_path / "ca").signed("one")
    tokens, certificate, key = tmp_path / "tokens.json", tmp_path / "tls.pem", tmp_path / "tls.key"
    write_tokens(tokens, {})
    certificate.write_bytes(pair.certificate.read_bytes())
    key.write_bytes(pair.key.read_bytes())
    files: dict[str, Any] = {"tokens_file": str(tokens), "tls_certificate": str(certificate), "tls_key": str(key)}
    async with serving(night, token="secret", dashboard_s=0.2, **files) as app:
        app.http.headers["Authorization"] = "Bearer secret"
        watch = app.tls
        assert watch is not None

        async def verdict() -> str:
            told = (await app.get("/dashboard/data"))["verdict"]
            return " ".join([told["level"], told["sentence"], *told["also"]])

        async def list_status_problems() -> list[str]:
            status_report = await asyncio.to_thread(lambda: report_status(night, read_state(night)))
            return [problem for problem in status_report["problems"] if "changed" in problem]

        # when both become unusable
        tokens.write_text("{")
        certificate.write_text("nothing")

        # then the verdict names both files
        async def is_told() -> bool:
            watch.reload_if_changed()
            text = await verdict()
            return text.startswith("bad ") and str(tokens) in text and str(certificate) in text

        assert await eventually(is_told)

        # and so does `larder status`, from the heartbeat
        async def is_in_status() -> bool:
            problems = await list_status_problems()
            return (
                len(problems) == 2
                and any("revoked tokens may still be valid" in line and str(tokens) in line for line in problems)
                and any("earlier certificate" in line and str(certificate) in line for line in problems)
            )

        assert await eventually(is_in_status)

        # and it names neither once they can be used
        write_tokens(tokens, {})
        certificate.write_bytes(pair.certificate.read_bytes())

        async def is_over() -> bool:
            watch.reload_if_changed()
            text = await verdict()
            return str(tokens) not in text and str(certificate) not in text and not await list_status_problems()

        assert await eventually(is_over)


@pytest.mark.parametrize("what", ["tokens", "certificate", "token"])
def test_check_says_what_serve_would_refuse_and_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "tokens": 'tokens_file = "tokens.json"', "certificate": 'tls_certificate = "tls.pem"\ntls_key = "tls.key"',
        "token": "",
    }  # fmt: skip
    (tmp_path / "tokens.json").write_text("{")
    (tmp_path / "tls.pem").write_text("nothing")
    (tmp_path / "tls.key").write_text("nothing")
    (tmp_path / "larder.toml").write_text(f"[serving]\n{lines[what]}\n")
    monkeypatch.setenv("LARDER_CONFIG", str(tmp_path / "larder.toml"))
    monkeypatch.delenv("LARDER_TOKEN", raising=False)
    if what == "token":
        monkeypatch.setenv("LARDER_TOKEN", "two words")

    code = check.main([], prog="larder check")

    first_line, *other_lines = capsys.readouterr().out.splitlines()
    assert code == 3 and first_line.startswith("to do     settings ") and len(other_lines) >= 8
    if what == "token":
        assert "printable characters without spaces" in first_line
        return
    with pytest.raises(ConfigError) as refusal:
        check_configured_files(ServingConfig.load({"LARDER_CONFIG": str(tmp_path / "larder.toml")}))
    assert refusal.value.message in first_line


async def test_a_certificate_that_expired_before_the_start_is_told_by_check_status_and_dashboard(
    tmp_path: Path, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a pair that fits together and has expired
    night = build_night(tmp_path / "night", own_redis.url)
    pair = Authority.create(tmp_path / "ca").signed("old", days=0)
    files = {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    (tmp_path / "larder.toml").write_text(
        f'[serving]\ntls_certificate = "{pair.certificate}"\ntls_key = "{pair.key}"\n'
    )
    monkeypatch.setenv("LARDER_CONFIG", str(tmp_path / "larder.toml"))

    # When it is checked
    code = await asyncio.to_thread(check.main, [], prog="larder check")

    # Then there is something to do
    assert code == 3
    assert capsys.readouterr().out.startswith(f"to do     settings  tls_certificate {pair.certificate} expired at ")

    # When a service starts with it nevertheless
    async with serving(night, dashboard_s=0.2, **files) as app:

        async def is_told() -> bool:
            report = await asyncio.to_thread(lambda: report_status(night, read_state(night)))
            verdict = (await app.get("/dashboard/data"))["verdict"]
            text = " ".join([verdict["sentence"], *verdict["also"]])
            return any(
                "not valid now" in problem and f"{pair.certificate}, expired at" in problem
                for problem in report["problems"]
            ) and ("not valid now" in text and "expired at" in text)

        # Then it answers, and status and dashboard say so
        assert await eventually(is_told)
        (expires_at_s,) = (await app.scrape_samples("larder_tls_expires_at_seconds")).values()
        assert 0 <= time.time() - expires_at_s < 600
