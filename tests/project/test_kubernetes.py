"""deploy/k8s/sidecar.yaml fits the Kubernetes schemas, and its ports, paths, times and names are the product's."""

from __future__ import annotations

import ast
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from meter import config
from tests.project import product
from tests.project.demo import Demo
from tests.project.deployment import flags, urls, weir_names
from tests.project.product import ROOT

FILE = "deploy/k8s/sidecar.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / FILE).read_text(encoding="utf-8")))
SPREAD_SECONDS, LAST_RECORDS_SECONDS = 5, 25
"""How long the news of a leaving pod may take; how long weir may need for its last records (meter/app.py: 10 s for
settlements, 10 s for shipping)."""


def the(kind: str) -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if each["kind"] == kind)
    return found


POD = the("Deployment")["spec"]["template"]["spec"]
(WEIR,) = POD["initContainers"]
(VLLM,) = POD["containers"]
(MIGRATE,) = the("Job")["spec"]["template"]["spec"]["containers"]
PORTS = {port["name"]: port["containerPort"] for port in WEIR["ports"]}


def settings() -> config.Config:
    """The ConfigMap's file as the sidecar reads it, its secrets filled in."""
    tree = yaml.safe_load(the("ConfigMap")["data"]["weir.yaml"])
    tree["quota_store"]["url"], tree["ledger"]["url"] = (
        "redis://redis:6379/0",
        "postgresql+asyncpg://weir@postgres/weir",
    )
    return config.Config.model_validate(tree)


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", [each["kind"] for each in OBJECTS])
def test_it_fits_the_schemas_of_the_oldest_and_the_newest_kubernetes(kind: str, version: str) -> None:
    kubernetes_validate.validate(the(kind), version, strict=True)


def test_weir_is_a_native_sidecar() -> None:
    assert WEIR["name"] == "weir"
    assert WEIR["restartPolicy"] == "Always"


@pytest.mark.parametrize("container", [WEIR, MIGRATE], ids=["sidecar", "migrate"])
def test_the_commands_exist_and_find_their_file(container: dict[str, Any]) -> None:
    assert not product.problems(container["args"])
    path = container["args"][container["args"].index("-c") + 1]
    folders = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "config"}
    assert path.rpartition("/")[0] in folders
    assert path.rpartition("/")[2] in the("ConfigMap")["data"]


def test_the_service_leads_to_weir_and_nowhere_else() -> None:
    (port,) = the("Service")["spec"]["ports"]
    assert PORTS[port["targetPort"]] == settings().listen.port
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Service")["spec"]["selector"].items() <= labels.items()
    assert the("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_nobody_gets_past_weir_to_the_engine() -> None:
    said = flags(VLLM["args"])
    assert said["host"] == "127.0.0.1"
    assert settings().backends["gpu"].url == f"http://127.0.0.1:{said['port']}"
    assert settings().models["assistant"].primary[0].model == said["served-model-name"]
    assert "ports" not in VLLM
    allowed = {port["port"] for rule in the("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == set(PORTS.values())


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_the_probes_ask_what_the_health_site_answers(probe: str, demo: Demo) -> None:
    get = WEIR[probe]["httpGet"]
    assert PORTS[get["port"]] == settings().health.port
    assert demo.get(f"{demo.health}{get['path']}").status == 200


def test_the_engine_is_probed_from_inside_the_pod() -> None:
    """The kubelet cannot reach a port that listens on the loopback interface only."""
    for probe in ("startupProbe", "livenessProbe"):
        assert [*urls(VLLM[probe]["exec"]["command"][-1])] == [
            ("127.0.0.1", int(flags(VLLM["args"])["port"]), "/health")
        ]


def test_prometheus_is_told_where_the_metrics_are(demo: Demo) -> None:
    notes = the("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert int(notes["prometheus.io/port"]) == settings().health.port
    assert "weir_requests_total" in demo.get(f"{demo.health}{notes['prometheus.io/path']}").body


def pre_stop() -> str:
    words = VLLM["lifecycle"]["preStop"]["exec"]["command"]
    assert words[:2] == ["python3", "-c"]
    code: str = words[2]
    return code


def test_before_the_engine_stops_weir_is_drained() -> None:
    code = pre_stop()
    ast.parse(code)
    assert [*urls(code)] == [("127.0.0.1", settings().health.port, "/drain")]
    assert 'method="POST"' in code


def test_the_times_of_a_deletion_add_up() -> None:
    grace = settings().listen.grace_seconds
    patience = int(flags(VLLM["args"])["shutdown-timeout"])
    (spread,) = re.findall(r"time\.sleep\((\d+)\)", pre_stop())
    (waits,) = re.findall(r"timeout=(\d+)", pre_stop())
    assert int(spread) == SPREAD_SECONDS
    assert int(waits) > grace
    assert patience >= grace
    assert POD["terminationGracePeriodSeconds"] >= SPREAD_SECONDS + grace + patience + LAST_RECORDS_SECONDS


def test_the_journal_survives_a_restart_of_the_container() -> None:
    (mount,) = (mount for mount in WEIR["volumeMounts"] if mount["name"] == "journal")
    assert mount["mountPath"] == str(settings().ledger.journal_dir)
    (volume,) = (volume for volume in POD["volumes"] if volume["name"] == "journal")
    assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) > settings().ledger.journal_max_mb


def test_while_redis_is_away_the_sidecars_together_spend_no_more_than_is_left() -> None:
    terms = the("Deployment")["spec"]
    most = terms["replicas"] + terms["strategy"]["rollingUpdate"]["maxSurge"]
    share = settings().quota_store.local_share
    assert share != "auto"
    assert share * most <= 1


def test_every_mount_has_its_volume() -> None:
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for each in (WEIR, VLLM) for mount in each["volumeMounts"]} == volumes


def test_secrets_come_from_the_secret() -> None:
    for container in (WEIR, MIGRATE):
        for variable in container["env"]:
            assert variable["valueFrom"]["secretKeyRef"]["name"] == "weir", variable
    text = (ROOT / FILE).read_text(encoding="utf-8")
    keys = {variable["valueFrom"]["secretKeyRef"]["key"] for variable in WEIR["env"]}
    assert keys == set(re.findall(r"--from-literal=([\w-]+)=", text))


def test_weir_runs_without_privileges() -> None:
    terms = WEIR["securityContext"]
    assert terms["runAsNonRoot"]
    assert terms["readOnlyRootFilesystem"]
    assert not terms["allowPrivilegeEscalation"]
    assert terms["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["fsGroup"] == terms["runAsGroup"]
    assert f"USER {terms['runAsUser']}:{terms['runAsGroup']}" in (ROOT / "deploy/Dockerfile").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(weir_names(FILE)))
def test_every_variable_is_one_the_product_reads(name: str) -> None:
    assert product.reads(name)
