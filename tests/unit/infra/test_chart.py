"""The Helm chart, linted and rendered by Helm itself and held against the schemas of Kubernetes' API."""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.config.section import variables_by_setting
from cache.config.serving import ServingConfig
from serving.process.supervisor import KILL_GRACE_S, START_MAX_S
from tests.integration.program import ROOT

CHART = ROOT / "infra/helm/larder"
TOOLS = ROOT / ".venv-chart/bin"
HELM = shutil.which("helm", path=str(TOOLS)) or shutil.which("helm")
VALIDATE = shutil.which("kubernetes-validate", path=str(TOOLS))
VERSIONS = ("1.27", "1.37")
"""Oldest that the chart names, and the newest whose schemas are at hand."""

pytestmark = pytest.mark.skipif(
    HELM is None or VALIDATE is None, reason="no Helm or no kubernetes-validate: `make chart-env`"
)

NEEDED = {
    "redis": {"existingSecret": "larder-redis"},
    "token": {"existingSecret": "larder-token"},
    "artifacts": {"existingClaim": "larder-artifacts"},
}
EVERYTHING: dict[str, Any] = {
    **NEEDED,
    "imagePullSecrets": [{"name": "registry"}],
    "autoscaling": {"queueSeconds": "10m", "maxReplicas": 40},
    "events": {"existingSecret": "larder-events"},
    "artifacts": {"existingClaim": "", "url": "s3://larder/artifacts"},
    "config": 'namespace = "shop"\n[serving]\nqueue_target_ms = 15\n',
    "workers": 4,
    "drain": {"preStopSeconds": 15, "seconds": 30},
    "service": {"type": "LoadBalancer", "scheme": "HTTPS", "annotations": {"a": "b"}},
    "disruptionBudget": {"maxUnavailable": "25%"},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}],
        "egressPorts": [6379, 26379, 443],
        "egressTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tlsConfig": {"serverName": "larder"}},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/reader"}},
    "startSeconds": 590,
    "extraEnv": [{"name": "LARDER_POLL_S", "value": "2"}],
    "extraEnvFrom": [{"secretRef": {"name": "store-keys"}}],
    "extraVolumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
    "extraVolumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}],
    "podAnnotations": {"c": "d"},
    "podLabels": {"team": "search"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "serving", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
FIXED = {
    **NEEDED,
    "autoscaling": {"enabled": False},
    "replicas": 3,
    "startSeconds": 1800,
    "networkPolicy": {"enabled": False},
}
CASES = {"least": NEEDED, "everything": EVERYTHING, "fixed": FIXED}


def helm(*arguments: str, values: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    """Helm's answer to a command about the chart, with these values."""
    return subprocess.run(
        [str(HELM), *arguments, "--values", "-"],
        input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@cache
def rendered(case: str) -> str:
    """What a release called `night` of these values is made of."""
    completed_process = helm("template", "night", str(CHART), "--kube-version", "1.37.0", values=CASES[case])
    assert completed_process.returncode == 0, completed_process.stderr
    return completed_process.stdout


@cache
def objects(case: str) -> dict[str, Any]:
    """Objects by kind; there is one of each."""
    manifests = [manifest for manifest in yaml.safe_load_all(rendered(case)) if manifest]
    kinds = {manifest["kind"]: manifest for manifest in manifests}
    assert len(kinds) == len(manifests)
    return kinds


def pod(case: str) -> Any:
    return objects(case)["Deployment"]["spec"]["template"]["spec"]


def container(case: str) -> Any:
    (only,) = pod(case)["containers"]
    return only


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_complain_of(case: str) -> None:
    completed_process = helm("lint", "--strict", str(CHART), values=CASES[case])

    assert completed_process.returncode == 0 and "WARNING" not in completed_process.stdout, (
        completed_process.stdout + completed_process.stderr
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_rendered_is_as_the_schemas_of_the_api_have_it(tmp_path: Path, version: str) -> None:
    standard_objects = [
        {kind: manifest for kind, manifest in objects(case).items() if kind != "ServiceMonitor"}
        for case in ("everything", "fixed")
    ]
    planted = json.loads(json.dumps(standard_objects[0]["Deployment"]))
    planted["spec"]["strategy"]["rollingUpdate"]["maxSurgee"] = 1
    good, invalid_file = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump_all([*standard_objects[0].values(), standard_objects[1]["Deployment"]]))
    invalid_file.write_text(yaml.safe_dump(planted))

    completed_process = subprocess.run(
        [str(VALIDATE), "--strict", "-k", version, str(good), str(invalid_file)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    output_lines = (completed_process.stdout + completed_process.stderr).splitlines()
    assert [line for line in output_lines if line.startswith("ERROR")] == [
        line for line in output_lines if "maxSurgee" in line
    ]
    assert completed_process.returncode != 0 and any("maxSurgee" in line for line in output_lines), output_lines


def test_every_kind_is_there_when_it_is_asked_for() -> None:
    always = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"}

    assert set(objects("fixed")) == always
    assert set(objects("least")) == always | {"HorizontalPodAutoscaler", "NetworkPolicy"}
    assert set(objects("everything")) == set(objects("least")) | {"ServiceMonitor"}


@pytest.mark.parametrize("case", CASES)
def test_all_that_selects_selects_the_pods(case: str) -> None:
    object_by_kind = objects(case)
    labels = object_by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        object_by_kind["Deployment"]["spec"]["selector"]["matchLabels"],
        object_by_kind["Service"]["spec"]["selector"],
        object_by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(constraint["labelSelector"]["matchLabels"] for constraint in pod(case)["topologySpreadConstraints"]),
    ]
    if "NetworkPolicy" in object_by_kind:
        selectors.append(object_by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])

    assert all(selector.items() <= labels.items() for selector in selectors)
    assert all(selector == selectors[0] for selector in selectors)


@pytest.mark.parametrize("case", CASES)
def test_a_pod_may_do_as_little_as_the_image_needs(case: str) -> None:
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "infra/Dockerfile.serving").read_text())
    about, rights = pod(case)["securityContext"], container(case)["securityContext"]

    assert user is not None and about["runAsUser"] == int(user[1]) and about["runAsNonRoot"]
    assert about["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(case)["automountServiceAccountToken"] is False
    writable = {mount["mountPath"] for mount in container(case)["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/state", "/tmp"}


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_what_the_service_answers(case: str) -> None:
    routes = (ROOT / "serving/http/routes.py").read_text()
    probes = {kind: container(case)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    scheme = "HTTPS" if case == "everything" else "HTTP"

    assert {kind: probe["httpGet"]["path"] for kind, probe in probes.items()} == {
        "startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz",
    }  # fmt: skip
    for probe in probes.values():
        assert f'"{probe["httpGet"]["path"]}"' in routes
        assert probe["httpGet"]["port"] == "http" and probe["httpGet"]["scheme"] == scheme
    allowed_s = CASES[case].get("startSeconds", 600)
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == allowed_s
    assert objects(case)["Deployment"]["spec"]["progressDeadlineSeconds"] > allowed_s


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_time_to_leave_the_endpoints_and_to_drain(case: str) -> None:
    command = container(case)["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = float(env(case)["LARDER_DRAIN_S"])

    assert command[0] == "sleep" and float(command[1]) >= 2 * 2  # two probes of readiness
    assert pod(case)["terminationGracePeriodSeconds"] > float(command[1]) + drain_s + KILL_GRACE_S


def env(case: str) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(case)["env"] if "value" in variable}


@pytest.mark.parametrize("case", CASES)
def test_variables_are_settings_and_what_is_secret_is_referred_to(case: str) -> None:
    known_variables = {*variables_by_setting(ServingConfig).values(), "LARDER_CONFIG"}
    secret = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in container(case)["env"]
        if "valueFrom" in variable
    }
    events = {"LARDER_EVENTS_URL": "larder-events"} if case == "everything" else {}

    assert {*env(case), *secret} <= known_variables
    assert secret == {"REDIS_URL": "larder-redis", "LARDER_TOKEN": "larder-token", **events}
    assert not {"REDIS_URL", "LARDER_TOKEN", "LARDER_EVENTS_URL"} & set(env(case))


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_the_pod_are_read_by_the_service(case: str, tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text(objects(case)["ConfigMap"]["data"]["larder.toml"])
    # The image listens on all addresses, so `LARDER_TOKEN` must be set.
    read = ServingConfig.load(
        {
            **{name: text for name, text in env(case).items() if name in variables_by_setting(ServingConfig).values()},
            "LARDER_CONFIG": str(file),
            "REDIS_URL": "redis://larder-reader:x@redis:6379/0",
            "LARDER_TOKEN": "x",
            "LARDER_HOST": "0.0.0.0",
        }
    )
    read.require_guard()

    assert read.ephemeral_state and read.state == "/state"
    assert read.drain_s == CASES[case].get("drain", {}).get("seconds", 10)
    assert (read.queue_target_ms == 15) == (case == "everything")


def test_another_configuration_is_another_revision() -> None:
    def read_config_digest(case: str) -> str:
        annotations = objects(case)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["larder/config"])

    assert read_config_digest("least") == read_config_digest("fixed") != read_config_digest("everything")


def test_the_autoscaler_goes_by_processor_time_and_by_the_queue_where_it_is_configured() -> None:
    def metrics(case: str) -> Any:
        return objects(case)["HorizontalPodAutoscaler"]["spec"]["metrics"]

    assert [metric["type"] for metric in metrics("least")] == ["Resource"]
    queue = metrics("everything")[1]["pods"]
    assert queue["target"] == {"type": "AverageValue", "averageValue": "10m"}
    name = queue["metric"]["name"].removeprefix("larder_")
    assert f'"{name}"' in (ROOT / "serving/admission/controller.py").read_text()
    assert "replicas" not in objects("least")["Deployment"]["spec"]
    assert objects("fixed")["Deployment"]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("value_overrides", "named"),
    [
        ({"redis": {}}, "redis.existingSecret"),
        ({"token": {}}, "token.existingSecret"),
        ({"artifacts": {}}, "artifacts.existingClaim or artifacts.url"),
        ({"workers": 0}, "workers"),
        ({"replica": 2}, "replica"),
        ({"autoscaling": {"queueSeconds": "ten"}}, "queueSeconds"),
        ({"artifacts": {"url": "bucket"}}, "url"),
        ({"artifacts": {"url": "s3://key:secret@bucket/larder"}}, "url"),
        ({"artifacts": {"existingClaim": "one", "url": "s3://two"}}, "artifacts.existingClaim and"),
        ({"workers": 2, "startSeconds": int(START_MAX_S) + 1}, "startSeconds"),
        ({"autoscaling": {"minReplicas": 9, "maxReplicas": 3}}, "autoscaling.minReplicas"),
        ({"resources": None}, "resources.requests.cpu"),
        ({"podLabels": {"app.kubernetes.io/component": "a"}}, "podLabels: app.kubernetes.io/component"),
        ({"podLabels": {"app.kubernetes.io/version": "1"}}, "podLabels: app.kubernetes.io/version"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(value_overrides: dict[str, Any], named: str) -> None:
    completed_process = helm("template", "night", str(CHART), values={**NEEDED, **value_overrides})

    assert completed_process.returncode != 0 and named in completed_process.stderr


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"artifacts": {"url": "abfs://larder@account.dfs.core.windows.net/store"}}, "Deployment"),
        ({"artifacts": {"url": "https://store:9000/larder"}}, "Deployment"),
        ({"workers": 2, "startSeconds": int(START_MAX_S)}, "Deployment"),
        ({"resources": None, "autoscaling": {"enabled": False}}, "Deployment"),
    ],
)
def test_values_next_to_the_refused_ones_are_accepted(values: dict[str, Any], kind: str) -> None:
    needed = {**NEEDED, "artifacts": {}} if "artifacts" in values else NEEDED
    completed_process = helm("template", "night", str(CHART), values={**needed, **values})

    assert completed_process.returncode == 0 and f"kind: {kind}" in completed_process.stdout, completed_process.stderr


def test_alerts_know_the_service_by_the_job_that_its_monitor_gives_it() -> None:
    rules = yaml.safe_load((ROOT / "infra/prometheus/rules/readers.yml").read_text())
    (down,) = (
        rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "LarderDown"
    )  # fmt: skip
    (endpoint,) = objects("everything")["ServiceMonitor"]["spec"]["endpoints"]
    (named,) = (relabeling for relabeling in endpoint["relabelings"] if relabeling["targetLabel"] == "job")

    assert down["expr"] == f'up{{job="{named["replacement"]}"}} == 0'
    assert "sourceLabels" not in named and "regex" not in named, "whatever it was called before"


def test_a_monitor_checks_a_certificate_where_there_is_one() -> None:
    http_process = helm("template", "night", str(CHART), values={**EVERYTHING, "service": {"scheme": "HTTP"}})
    (endpoint,) = objects("everything")["ServiceMonitor"]["spec"]["endpoints"]

    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {"serverName": "larder"}
    assert http_process.returncode == 0 and "tlsConfig" not in http_process.stdout


def test_an_object_store_is_reached_by_its_port_and_by_an_identity() -> None:
    def ports(**value_overrides: Any) -> list[int]:
        completed_process = helm("template", "night", str(CHART), values={**NEEDED, **value_overrides})
        (policy,) = (
            manifest for manifest in yaml.safe_load_all(completed_process.stdout) if manifest["kind"] == "NetworkPolicy"
        )
        return [port_rule["port"] for port_rule in policy["spec"]["egress"][1]["ports"]]

    store = {"artifacts": {"url": "s3://larder/artifacts"}}
    account = objects("everything")["ServiceAccount"]["metadata"]

    assert ports() == [6379]
    assert ports(**store) == [6379, 443]
    assert ports(**store, networkPolicy={"egressPorts": [443, 26379]}) == [443, 26379]
    assert account["annotations"] == EVERYTHING["serviceAccount"]["annotations"]
    assert "annotations" not in objects("least")["ServiceAccount"]["metadata"]


def test_the_label_of_a_long_tag_is_one_that_the_api_takes() -> None:
    tag = f"{'a' * 62}.{'b' * 17}"
    completed_process = helm("template", "night", str(CHART), values={**NEEDED, "image": {"tag": tag}})
    (deployment,) = (
        manifest for manifest in yaml.safe_load_all(completed_process.stdout) if manifest["kind"] == "Deployment"
    )  # fmt: skip

    assert deployment["metadata"]["labels"]["app.kubernetes.io/version"] == "a" * 62
    (serving,) = deployment["spec"]["template"]["spec"]["containers"]
    assert serving["image"] == f"larder-serving:{tag}"


def test_the_schema_covers_exactly_the_values_and_all_are_used() -> None:
    def names(values: Any, prefix: str = "") -> set[str]:
        return {
            path
            for name, value in values.items()
            for path in (
                names(value, f"{prefix}{name}.")
                if isinstance(value, dict) and value and name not in ("requests", "limits")
                else {prefix + name}
            )
        }

    def collect_schema_paths(schema: Any, prefix: str = "") -> set[str]:
        return {
            path
            for name, property_schema in schema["properties"].items()
            for path in (
                collect_schema_paths(property_schema, f"{prefix}{name}.")
                if property_schema.get("properties")
                else {prefix + name}
            )
        }  # fmt: skip

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())

    assert names(values) == collect_schema_paths(schema) - {"global"}
    for path in names(values):
        value_path, last = path.partition(".resources")[0], path.rsplit(".", 1)[-1]
        assert f".{last}" in templates or f".Values.{value_path.split('.')[0]} " in templates, path


def test_chart_and_project_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == project.partition(".dev")[0]


def test_the_values_for_airflow_name_what_the_chart_and_the_night_know() -> None:
    text = (ROOT / "infra/helm/airflow-values.yaml").read_text()
    values = yaml.safe_load(text)
    known_variables = {*variables_by_setting(ServingConfig).values(), "LARDER_CONFIG"}

    assert {variable["name"] for variable in values["env"]} <= known_variables
    policy = (ROOT / "infra/kubernetes/airflow_local_settings.py").read_text()
    queue = re.search(r'"LARDER_SCORE_QUEUE"\) or "(\w+)"', policy)
    assert queue is not None and f"airflow pools set {queue[1]} " in text
    assert values["executor"] == "KubernetesExecutor"
    assert values["workers"]["extraVolumes"] == values["dagProcessor"]["extraVolumes"]
    for name in ("workers", "dagProcessor"):
        volumes = {volume["name"] for volume in values[name]["extraVolumes"]}
        assert {mount["name"] for mount in values[name]["extraVolumeMounts"]} == volumes


def test_the_values_for_airflow_are_those_of_its_image() -> None:
    """The defaults of Airflow's chart are for Airflow's own image: its user, home, script of logs, fab and statsd."""
    values = yaml.safe_load((ROOT / "infra/helm/airflow-values.yaml").read_text())
    image = (ROOT / "infra/Dockerfile.airflow").read_text()
    lock = (ROOT / "infra/locks/airflow.txt").read_text()
    user = re.search(r"useradd .*--uid (\d+)", image)
    package, *inner, module, manager = values["config"]["core"]["auth_manager"].split(".")
    airflow = importlib.util.find_spec(package)  # found, not imported: that makes files in a home

    assert user is not None and values["uid"] == int(user[1])
    assert f"AIRFLOW_HOME={values['airflowHome']} " in image
    assert f"\napache-airflow=={values['airflowVersion']} " in lock
    assert airflow is not None and airflow.origin is not None
    source = Path(airflow.origin).parent.joinpath(*inner, f"{module}.py").read_text()
    assert f"class {manager}(" in source
    if not re.search("^apache-airflow-providers-fab==", lock, re.MULTILINE):
        assert manager == "SimpleAuthManager" and values["createUserJob"] == {"enabled": False}
    if not re.search("^statsd==", lock, re.MULTILINE):
        assert values["statsd"] == {"enabled": False}
    if "clean-logs" not in image:
        for name in ("scheduler", "triggerer", "dagProcessor", "workers"):
            assert values[name]["logGroomerSidecar"] == {"enabled": False}, name
