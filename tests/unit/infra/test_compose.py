import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).parents[3] / "infra"
ROOT = INFRA.parent
COMPOSE: Any = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES: Any = COMPOSE["services"]
DOCKERFILES = sorted(INFRA.glob("Dockerfile.*"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_takes_the_driver_of_an_object_store_with_the_fsspec_of_its_lock(file: Path) -> None:
    dockerfile_head, argument, after = file.read_text().partition("ARG STORE_DRIVER=\n")
    (lock,) = re.findall(r"--require-hashes -r /(\S+)", dockerfile_head)
    (version_command,) = re.findall(r'fsspec="\$\((.*?)\)" &&', after)

    fsspec_requirement = subprocess.run(
        ["sh", "-c", version_command.replace(f"/{lock}", str(INFRA / lock))], capture_output=True, text=True, check=True
    ).stdout.strip()

    assert argument and 'pip install --no-cache-dir "$STORE_DRIVER" "$fsspec"' in after
    assert f"\n{fsspec_requirement} " in (INFRA / lock).read_text() and fsspec_requirement.startswith("fsspec==")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_no_program_of_a_build_fails_unseen_at_the_head_of_a_pipe(file: Path) -> None:
    """Rule DL4006 of hadolint: `sh` tells how the last program of a pipe ended, and of no other."""
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)", file.read_text(), re.MULTILINE)

    assert commands
    assert [command for command in commands if re.search(r"[^|]\|[^|]", command)] == []


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_depends_only_on_services_that_exist(name: str) -> None:
    assert set(SERVICES[name].get("depends_on", ())) <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_mounts_declared_volumes_and_files_that_exist(name: str) -> None:
    for mount in SERVICES[name].get("volumes", ()):
        source = mount.split("}")[0] if mount.startswith("$") else mount.split(":")[0]
        if source.startswith("."):
            assert (INFRA / source).exists(), source
        elif not source.startswith("$"):
            assert source in COMPOSE["volumes"], source


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_built_here_or_names_a_version(name: str) -> None:
    build = SERVICES[name].get("build")
    if build:
        assert (INFRA / build["context"] / build["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d", SERVICES[name]["image"]), "no version: tomorrow's is another one"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_publishes_ports_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


def test_every_variable_has_a_default_or_a_line_to_fill_in() -> None:
    text = (INFRA / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)(?::\?)?\}", text))
    to_fill = set(re.findall(r"^(\w+)=", (INFRA / "example.env").read_text(), re.MULTILINE))

    assert used == to_fill


@pytest.mark.parametrize(("variable", "server"), [("REDIS_URL", "redis"), ("LARDER_EVENTS_URL", "redis-events")])
def test_every_program_gets_the_redis_user_with_its_own_rights(variable: str, server: str) -> None:
    users = {
        name: match.groups()
        for name, service in SERVICES.items()
        if (url := service.get("environment", {}).get(variable))
        and (match := re.search(r"//([\w-]+):.*@([\w-]+):", url))
    }

    assert users.pop("serving") == ("larder-reader", server)
    assert set(users.values()) == {("larder-loader", server)}
    for name in {*users, "serving"} - {"airflow-init"}:  # which asks Postgres alone
        assert SERVICES[name]["depends_on"][server] == {"condition": "service_healthy"}


def test_what_is_acknowledged_survives_the_container_of_events_alone() -> None:
    def volumes(name: str) -> list[str]:
        return [volume for volume in SERVICES[name]["volumes"] if not volume.startswith(".")]

    assert volumes("redis") == [] and volumes("redis-events") == ["events:/data"]


def test_service_and_night_read_one_file_of_settings() -> None:
    def source(name: str, path: str) -> str:
        mounts = [
            volume.rsplit(":", 1)[0] if volume.endswith(":ro") else volume for volume in SERVICES[name]["volumes"]
        ]
        (matching_mount,) = [mount for mount in mounts if path.startswith(mount.rsplit(":", 1)[1])]
        of_host, of_container = matching_mount.rsplit(":", 1)
        return f"{of_host}{path.removeprefix(of_container)}"

    files = {source(name, SERVICES[name]["environment"]["LARDER_CONFIG"]) for name in ("serving", "airflow-scheduler")}
    assert files == {"${LARDER_DATA:?}/larder.toml"}


def test_airflow_creates_the_pool_that_scoring_waits_for() -> None:
    command = " ".join(SERVICES["airflow-init"]["command"])

    assert "airflow pools set gpu" in command
    for name in ("airflow-api-server", "airflow-scheduler", "airflow-dag-processor"):
        assert "airflow-init" in SERVICES[name]["depends_on"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_exists_and_is_sent_to_the_builder(dockerfile: Path) -> None:
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)

    assert copies
    for source in " ".join(copies).split():
        assert (ROOT / source).exists(), source
        assert any(source == admitted_path or source.startswith(f"{admitted_path}/") for admitted_path in admitted), (
            source
        )


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_builds_the_compiled_parts_of_every_package_that_it_copies(dockerfile: Path) -> None:
    text = dockerfile.read_text()

    for package, built in (("cache", "cache/native/_columns"), ("cache", "cache/topk/_topk")):
        folder, name = built.rsplit("/", 1)
        is_built = f"/native/{name}.so /native" in text
        assert is_built == (f"COPY {package} ./{package}\n" in text)
        assert is_built == (f"COPY --from=build /native/{name}.so ./{folder}/\n" in text)


def test_no_image_takes_what_a_developer_compiled() -> None:
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_dags_are_created_unpaused() -> None:
    for name in ("airflow-api-server", "airflow-scheduler", "airflow-dag-processor"):
        settings = SERVICES[name]["environment"]
        assert settings["AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION"] == "False"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_installs_locked_hashes_and_does_not_run_as_root(dockerfile: Path) -> None:
    text = dockerfile.read_text()

    assert "--require-hashes" in text
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)


@pytest.mark.parametrize("lock", sorted((INFRA / "locks").glob("*.txt")), ids=lambda path: path.name)
def test_a_lock_names_versions_and_hashes_and_no_address(lock: Path) -> None:
    text = lock.read_text()

    assert "://" not in text
    assert len(re.findall(r"^\S+==", text, re.MULTILINE)) > 3
    entries = re.findall(r"^\S+==\S+", text, re.MULTILINE)
    # Tools have a separate environment, which shares nothing with the others.
    has_its_own = lock.stem in ("audit", "chart", "docs", "package")
    assert has_its_own or all(f"\n{entry}" in f"\n{everything()}" for entry in entries)


def everything() -> str:
    """Return the lock that the tests run with."""
    return (INFRA / "locks/all.txt").read_text()
