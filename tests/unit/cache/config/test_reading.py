"""Reading of settings: which source wins, and where an error says that its value stands."""

from pathlib import Path

import pytest

from cache.config.night import NightConfig
from cache.config.serving import ServingConfig
from cache.errors import ConfigError


def written(folder: Path, text: str) -> dict[str, str]:
    (folder / "larder.toml").write_text(text)
    return {"LARDER_CONFIG": str(folder / "larder.toml")}


@pytest.mark.parametrize(
    ("text", "variables", "message_pattern"),
    [
        ("[serving]\nport = 70000", {}, r"larder.toml \[serving\]: port must be 0 to 65,535, not 70,000: Port to bind"),
        ("[serving]\nprot = 1", {}, r"larder.toml \[serving\]: unknown setting 'prot'; did you mean port\?$"),
        ('[serving]\nlog = "xml"', {}, r"\[serving\]: log must be text or json, not 'xml'"),
        ('[serving]\nworkers = "2"', {}, r"\[serving\]: workers must be a whole number, not '2'"),
        ("namespace = 5", {}, r"larder.toml: namespace must be a string, not 5"),
        ('namespace = "a b"', {}, r"larder.toml: namespace has 1 to 64 letters"),
        ("serving = 5", {}, r"larder.toml \[serving\] must be a section of settings, not 5"),
        ("", {"LARDER_PORT": "many"}, r"^LARDER_PORT: port must be a whole number, not 'many'"),
        ("", {"LARDER_SCHEDULE": "nightly"}, r"^LARDER_SCHEDULE: schedule is a cron of five fields"),
        ("", {"LARDER_INSECURE": "perhaps"}, r"^LARDER_INSECURE: insecure must be true or false, not 'perhaps'"),
    ],
)  # fmt: skip
def test_an_error_names_file_section_key_value_and_remedy_on_one_line(
    tmp_path: Path, text: str, variables: dict[str, str], message_pattern: str
) -> None:
    with pytest.raises(ConfigError, match=message_pattern) as caught:
        ServingConfig.load(written(tmp_path, text) | variables)

    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    ['[serving]\ntoken = "opensesame"', 'redis_url = "redis://:opensesame@host"',
     '[serving]\nredis_url = "redis://user:opensesame@host"', 'artifacts = "s3://key:opensesame@bucket/larder"',
     'redis_url = "redis+sentinel://h:1/svc?sentinel_password=opensesame"', 'redis_url = "redis://h?password=opensesame"'],
)  # fmt: skip
def test_a_secret_in_the_file_is_refused_and_never_shown(tmp_path: Path, text: str) -> None:
    variables = {"LARDER_TOKEN": "x", "REDIS_URL": "redis://h", "LARDER_ARTIFACTS": str(tmp_path)}
    message_pattern = r"larder.toml(:| \[serving\]:) .* set (LARDER_TOKEN|REDIS_URL|LARDER_ARTIFACTS)"
    with pytest.raises(ConfigError, match=message_pattern):
        ServingConfig.load(written(tmp_path, text) | variables)
    with pytest.raises(ConfigError, match=message_pattern) as caught:
        ServingConfig.load(written(tmp_path, text))

    assert "opensesame" not in caught.value.message


def test_an_account_without_a_password_is_no_secret(tmp_path: Path) -> None:
    url = "abfs://larder@account.dfs.core.windows.net/store"

    assert ServingConfig.load(written(tmp_path, f'artifacts = "{url}"')).artifacts == url


def test_a_secret_comes_from_the_environment_and_is_not_in_the_settings_text() -> None:
    config = ServingConfig.load({"LARDER_TOKEN": "opensesame"})

    assert config.token == "opensesame" and "opensesame" not in repr(config)


def test_a_path_is_relative_to_the_file_or_to_the_current_folder_by_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = written(tmp_path, 'artifacts = "store"')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    for config in (NightConfig.configured(environ), ServingConfig.load(environ)):
        assert config.store().url.startswith(str(tmp_path / "store"))
        assert config.path(config.state) == tmp_path / ".larder"
    for config in (NightConfig.configured({"LARDER_STATE": "here"}), ServingConfig.load({"LARDER_STATE": "here"})):
        assert config.path(config.state) == tmp_path / "elsewhere/here"


def test_the_night_reads_of_the_environment_what_it_shares_and_the_device_alone(tmp_path: Path) -> None:
    environ = written(tmp_path, "shards = 8\noverlay_ttl_s = 60.0\n[dag]\nretry_delay_s = 30.0\n")
    variables = {
        "LARDER_SHARDS": "3",
        "LARDER_OVERLAY_TTL_S": "5",
        "LARDER_RETRY_DELAY_S": "1",
        "LARDER_BASE": "/",
        "LARDER_DEVICE": "off",
        "LARDER_SCHEDULE_GRACE_S": "60",
        "LARDER_EPHEMERAL_STATE": "yes",
    }

    config = NightConfig.configured(environ | variables, namespace="said")

    assert (config.shards, config.overlay_ttl_s, config.dag.retry_delay_s) == (8, 60.0, 30.0)
    assert (config.device, config.schedule_grace_s, config.ephemeral_state) == ("off", 60.0, True)
    assert (config.namespace, config.base) == ("said", str(tmp_path))


def test_a_program_ignores_the_sections_of_the_other(tmp_path: Path) -> None:
    environ = written(tmp_path, "[serving]\nport = 70000\n")

    assert NightConfig.configured(environ).shards == 4
    assert ServingConfig.load(written(tmp_path, "[gates]\nexact = -1\n")).port == 8000
