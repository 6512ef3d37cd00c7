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

from cache.config.section import variables
from cache.config.serving import ServingConfig
from serving.process.supervisor import GRACE_S, START_S
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
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "tlsConfig": {"serverName": "larder"},
    },
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
    made = helm("template", "night", str(CHART), "--kube-version", "1.37.0", values=CASES[case])
    assert made.returncode == 0, made.stderr
    return made.stdout


@cache
def objects(case: str) -> dict[str, Any]:
    """Objects by kind; there is one of each."""
    found = [each for each in yaml.safe_load_all(rendered(case)) if each]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def pod(case: str) -> Any:
    return objects(case)["Deployment"]["spec"]["template"]["spec"]


def container(case: str) -> Any:
    (only,) = pod(case)["containers"]
    return only


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_complain_of(case: str) -> None:
    said = helm("lint", "--strict", str(CHART), values=CASES[case])

    assert said.returncode == 0 and "WARNING" not in said.stdout, said.stdout + said.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_rendered_is_as_the_schemas_of_the_api_have_it(
    tmp_path: Path, version: str
) -> None:
    known = [
        {kind: each for kind, each in objects(case).items() if kind != "ServiceMonitor"}
        for case in ("everything", "fixed")
    ]
    planted = json.loads(json.dumps(known[0]["Deployment"]))
    planted["spec"]["strategy"]["rollingUpdate"]["maxSurgee"] = 1
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump_all([*known[0].values(), known[1]["Deployment"]]))
    bad.write_text(yaml.safe_dump(planted))

    said = subprocess.run(
        [str(VALIDATE), "--strict", "-k", version, str(good), str(bad)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    found = (said.stdout + said.stderr).splitlines()
    assert [line for line in found if line.startswith("ERROR")] == [
        line for line in found if "maxSurgee" in line
    ]
    assert said.returncode != 0 and any("maxSurgee" in line for line in found), found


def test_each_kind_is_there_when_it_is_asked_for() -> None:
    always = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"}

    assert set(objects("fixed")) == always
    assert set(objects("least")) == always | {"HorizontalPodAutoscaler", "NetworkPolicy"}
    assert set(objects("everything")) == set(objects("least")) | {"ServiceMonitor"}


@pytest.mark.parametrize("case", CASES)
def test_all_that_selects_selects_the_pods(case: str) -> None:
    made = objects(case)
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        made["Deployment"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in pod(case)["topologySpreadConstraints"]),
    ]
    if "NetworkPolicy" in made:
        selectors.append(made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])

    assert all(each.items() <= labels.items() for each in selectors)
    assert all(each == selectors[0] for each in selectors)


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
    writable = {
        each["mountPath"] for each in container(case)["volumeMounts"] if not each.get("readOnly")
    }
    assert writable == {"/state", "/tmp"}


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_what_the_service_answers(case: str) -> None:
    routes = (ROOT / "serving/http/routes.py").read_text()
    probes = {
        kind: container(case)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
    }
    scheme = "HTTPS" if case == "everything" else "HTTP"

    assert {kind: each["httpGet"]["path"] for kind, each in probes.items()} == {
        "startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz",
    }  # fmt: skip
    for each in probes.values():
        assert f'"{each["httpGet"]["path"]}"' in routes
        assert each["httpGet"]["port"] == "http" and each["httpGet"]["scheme"] == scheme
    allowed_s = CASES[case].get("startSeconds", 600)
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == allowed_s
    assert objects(case)["Deployment"]["spec"]["progressDeadlineSeconds"] > allowed_s


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_time_to_leave_the_endpoints_and_to_drain(case: str) -> None:
    command = container(case)["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = float(env(case)["LARDER_DRAIN_S"])

    assert command[0] == "sleep" and float(command[1]) >= 2 * 2  # two probes of readiness
    assert pod(case)["terminationGracePeriodSeconds"] > float(command[1]) + drain_s + GRACE_S


def env(case: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(case)["env"] if "value" in each}


@pytest.mark.parametrize("case", CASES)
def test_variables_are_settings_and_what_is_secret_is_referred_to(case: str) -> None:
    known = {*variables(ServingConfig).values(), "LARDER_CONFIG"}
    secret = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["name"]
        for each in container(case)["env"]
        if "valueFrom" in each
    }
    events = {"LARDER_EVENTS_URL": "larder-events"} if case == "everything" else {}

    assert {*env(case), *secret} <= known
    assert secret == {"REDIS_URL": "larder-redis", "LARDER_TOKEN": "larder-token", **events}
    assert not {"REDIS_URL", "LARDER_TOKEN", "LARDER_EVENTS_URL"} & set(env(case))


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_the_pod_are_read_by_the_service(case: str, tmp_path: Path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text(objects(case)["ConfigMap"]["data"]["larder.toml"])
    # `LARDER_TOKEN` keeps others out, and the image listens on all addresses.
    read = ServingConfig.load(
        {
            **{
                name: text
                for name, text in env(case).items()
                if name in variables(ServingConfig).values()
            },
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
    def mark(case: str) -> str:
        found = objects(case)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return str(found["larder/config"])

    assert mark("least") == mark("fixed") != mark("everything")


def test_the_autoscaler_goes_by_processor_time_and_by_the_queue_where_it_is_told_to() -> None:
    def metrics(case: str) -> Any:
        return objects(case)["HorizontalPodAutoscaler"]["spec"]["metrics"]

    assert [each["type"] for each in metrics("least")] == ["Resource"]
    queue = metrics("everything")[1]["pods"]
    assert queue["target"] == {"type": "AverageValue", "averageValue": "10m"}
    name = queue["metric"]["name"].removeprefix("larder_")
    assert f'"{name}"' in (ROOT / "serving/metrics/fast_counters.py").read_text()
    assert "replicas" not in objects("least")["Deployment"]["spec"]
    assert objects("fixed")["Deployment"]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("changed", "named"),
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
        ({"workers": 2, "startSeconds": int(START_S) + 1}, "startSeconds"),
        ({"autoscaling": {"minReplicas": 9, "maxReplicas": 3}}, "autoscaling.minReplicas"),
        ({"resources": None}, "resources.requests.cpu"),
        (
            {"podLabels": {"app.kubernetes.io/component": "a"}},
            "podLabels: app.kubernetes.io/component",
        ),
        ({"podLabels": {"app.kubernetes.io/version": "1"}}, "podLabels: app.kubernetes.io/version"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    said = helm("template", "night", str(CHART), values={**NEEDED, **changed})

    assert said.returncode != 0 and named in said.stderr


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"artifacts": {"url": "abfs://larder@account.dfs.core.windows.net/store"}}, "Deployment"),
        ({"artifacts": {"url": "https://store:9000/larder"}}, "Deployment"),
        ({"workers": 2, "startSeconds": int(START_S)}, "Deployment"),
        ({"resources": None, "autoscaling": {"enabled": False}}, "Deployment"),
    ],
)
def test_what_lies_beside_a_refusal_is_taken(values: dict[str, Any], kind: str) -> None:
    needed = {**NEEDED, "artifacts": {}} if "artifacts" in values else NEEDED
    said = helm("template", "night", str(CHART), values={**needed, **values})

    assert said.returncode == 0 and f"kind: {kind}" in said.stdout, said.stderr


def test_alerts_know_the_service_by_the_job_that_its_monitor_gives_it() -> None:
    rules = yaml.safe_load((ROOT / "infra/prometheus/rules/readers.yml").read_text())
    (down,) = (
        rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "LarderDown"
    )  # fmt: skip
    (endpoint,) = objects("everything")["ServiceMonitor"]["spec"]["endpoints"]
    (named,) = (each for each in endpoint["relabelings"] if each["targetLabel"] == "job")

    assert down["expr"] == f'up{{job="{named["replacement"]}"}} == 0'
    assert "sourceLabels" not in named and "regex" not in named, "whatever it was called before"


def test_a_monitor_checks_a_certificate_where_there_is_one() -> None:
    plain = helm(
        "template", "night", str(CHART), values={**EVERYTHING, "service": {"scheme": "HTTP"}}
    )
    (endpoint,) = objects("everything")["ServiceMonitor"]["spec"]["endpoints"]

    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {"serverName": "larder"}
    assert plain.returncode == 0 and "tlsConfig" not in plain.stdout


def test_an_object_store_is_reached_by_its_port_and_by_an_identity() -> None:
    def ports(**changed: Any) -> list[int]:
        said = helm("template", "night", str(CHART), values={**NEEDED, **changed})
        (policy,) = (
            each for each in yaml.safe_load_all(said.stdout) if each["kind"] == "NetworkPolicy"
        )
        return [each["port"] for each in policy["spec"]["egress"][1]["ports"]]

    store = {"artifacts": {"url": "s3://larder/artifacts"}}
    account = objects("everything")["ServiceAccount"]["metadata"]

    assert ports() == [6379]
    assert ports(**store) == [6379, 443]
    assert ports(**store, networkPolicy={"egressPorts": [443, 26379]}) == [443, 26379]
    assert account["annotations"] == EVERYTHING["serviceAccount"]["annotations"]
    assert "annotations" not in objects("least")["ServiceAccount"]["metadata"]


def test_the_label_of_a_long_tag_is_one_that_the_api_takes() -> None:
    tag = f"{'a' * 62}.{'b' * 17}"
    said = helm("template", "night", str(CHART), values={**NEEDED, "image": {"tag": tag}})
    (made,) = (
        each for each in yaml.safe_load_all(said.stdout) if each["kind"] == "Deployment"
    )  # fmt: skip

    assert made["metadata"]["labels"]["app.kubernetes.io/version"] == "a" * 62
    (serving,) = made["spec"]["template"]["spec"]["containers"]
    assert serving["image"] == f"larder-serving:{tag}"


def test_the_schema_tells_of_exactly_the_values_and_each_is_used() -> None:
    def names(values: Any, before: str = "") -> set[str]:
        return {
            path
            for name, value in values.items()
            for path in (
                names(value, f"{before}{name}.")
                if isinstance(value, dict) and value and name not in ("requests", "limits")
                else {before + name}
            )
        }

    def told(schema: Any, before: str = "") -> set[str]:
        return {
            path
            for name, each in schema["properties"].items()
            for path in (told(each, f"{before}{name}.") if each.get("properties") else {before + name})
        }  # fmt: skip

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())

    assert names(values) == told(schema) - {"global"}
    for path in names(values):
        whole, last = path.partition(".resources")[0], path.rsplit(".", 1)[-1]
        assert f".{last}" in templates or f".Values.{whole.split('.')[0]} " in templates, path


def test_chart_and_project_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == project.partition(".dev")[0]


def test_the_values_for_airflow_name_what_the_chart_and_the_night_know() -> None:
    text = (ROOT / "infra/helm/airflow-values.yaml").read_text()
    values = yaml.safe_load(text)
    known = {*variables(ServingConfig).values(), "LARDER_CONFIG"}

    assert {each["name"] for each in values["env"]} <= known
    policy = (ROOT / "infra/kubernetes/airflow_local_settings.py").read_text()
    queue = re.search(r'"LARDER_SCORE_QUEUE"\) or "(\w+)"', policy)
    assert queue is not None and f"airflow pools set {queue[1]} " in text
    assert values["executor"] == "KubernetesExecutor"
    assert values["workers"]["extraVolumes"] == values["dagProcessor"]["extraVolumes"]
    for name in ("workers", "dagProcessor"):
        volumes = {each["name"] for each in values[name]["extraVolumes"]}
        assert {each["name"] for each in values[name]["extraVolumeMounts"]} == volumes


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
