"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from cache.config.serving import PeerBounds
from cache.config.timetable import Schedule, Timetable
from cache.errors import ConfigError
from precompute.config.settings import NightConfig
from serving.config.settings import ServingConfig


def test_the_environment_outranks_the_file_and_the_command_line_both(tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text(
        'namespace = "shop"\nartifacts = "store"\nshards = 8\n'
        '[serving]\nport = 1\ndeadline_ms = 5\nprecision = "fp32"\n'
    )
    environ = {"LARDER_CONFIG": str(file), "LARDER_PORT": "2", "REDIS_URL": "redis://r", "LARDER_TOKEN": ""}

    config = ServingConfig.load(environ, port=3, host=None)

    assert (config.port, config.deadline_ms, config.precision) == (3, 5.0, "fp32")
    assert (config.namespace, config.redis_url) == ("shop", "redis://r")
    assert config.artifacts == str(tmp_path / "store")
    assert config.host == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        {"LARDER_PORT": "many"}, {"LARDER_PORT": "70000"}, {"LARDER_PORT": "1.5"},
        {"LARDER_L1_BYTES": "0"}, {"LARDER_DEADLINE_MS": "nan"}, {"LARDER_INSECURE": "perhaps"},
        {"LARDER_LOG": "xml"}, {"LARDER_LOG_SHARE": "1.1"}, {"LARDER_TRACES_SHARE": "nan"}, {"LARDER_LOG_SLOW_MS": "0"},
        {"LARDER_TRACES": "perhaps"}, {"LARDER_PRECISION": "int4"}, {"LARDER_NAMESPACE": "a{b}"},
        {"LARDER_SCHEDULE": "at night"}, {"LARDER_TIMEZONE": "Mars/Olympus"}, {"LARDER_SCHEDULE_GRACE_S": "-1"},
        {"LARDER_CONFIG": "/nowhere/larder.toml"}, {"LARDER_BODIES_BYTES": "1"}, {"LARDER_HEAD_BYTES": "0"},
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        ServingConfig.load(environ)


def test_bounds_of_peers_are_settings() -> None:
    config = ServingConfig.load({"LARDER_HEAD_BYTES": "9", "LARDER_WRITE_TIMEOUT_S": "2.5"})

    assert config.bounds(7) == PeerBounds(head_bytes=9, write_timeout_s=2.5, connections_max=7)
    assert ServingConfig().bounds(PeerBounds().connections_max) == PeerBounds()


def test_an_unknown_setting_of_the_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text("[serving]\nprot = 1\n")

    with pytest.raises(ConfigError, match="prot"):
        ServingConfig.load({"LARDER_CONFIG": str(file)})


def test_only_loopback_may_be_bound_without_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        ServingConfig(host=host).require_guard()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="LARDER_TOKEN"):
            ServingConfig(host=host).require_guard()
        ServingConfig(host=host, token="t").require_guard()
        ServingConfig(host=host, insecure=True).require_guard()


@pytest.mark.parametrize("text", ['namespace = "shop"\n', 'artifacts = "store"\nstate = "here"\n'])
def test_one_file_leads_night_and_service_to_the_same_places(tmp_path: Path, text: str) -> None:
    """Whether the file names the places or leaves them out, and wherever either program is started."""
    (tmp_path / "larder.toml").write_text(text)
    environment = {"LARDER_CONFIG": str(tmp_path / "larder.toml")}

    service, night = (ServingConfig.load(environment), NightConfig.configured({}, tmp_path / "larder.toml"))

    assert service.store().url == night.store().url
    assert Path(service.state) == night.path(night.state)
    assert service.namespace == night.namespace


def test_one_schedule_above_the_sections_is_the_nights_the_services_and_the_dags(tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text('schedule = "30 1 * * *"\ntimezone = "Europe/Berlin"\nschedule_grace_s = 60\n')
    environment = {"LARDER_CONFIG": str(file)}

    service, night = ServingConfig.load(environment), NightConfig.configured({}, file)

    assert service.nights() == Schedule("30 1 * * *", "Europe/Berlin", 60.0)
    assert Timetable.configured(environment).nights() == service.nights()
    assert (night.schedule, night.timezone) == ("30 1 * * *", "Europe/Berlin")


def test_files_of_tokens_and_tls_are_relative_to_the_settings_file_or_the_current_folder(tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text('[serving]\ntokens_file = "t.json"\ntls_certificate = "c"\ntls_key = "/k"\n')

    config_from_file = ServingConfig.load({"LARDER_CONFIG": str(file)})
    named = ServingConfig.load({"LARDER_TOKENS_FILE": "t.json"})

    assert (config_from_file.tokens_file, config_from_file.tls_certificate, config_from_file.tls_key) == (
        str(tmp_path / "t.json"), str(tmp_path / "c"), "/k",
    )  # fmt: skip
    assert named.tokens_file == str(Path("t.json").absolute())
    assert ServingConfig.load({}).tokens_file == "" and not ServingConfig.load({}).has_tokens
    assert config_from_file.url_scheme == "https" and named.url_scheme == "http"


def test_a_tokens_file_guards_as_a_token_does() -> None:
    ServingConfig(host="0.0.0.0", tokens_file="t.json").require_guard()
