"""docker-compose.yml fits its schema, and everything it names is there: files, ports, commands, variables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meter import config
from tests.project import product
from tests.project.deployment import compose, flags, urls, weir_names
from tests.project.product import ROOT, read_yaml

SERVICES = compose()
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("tokenweir:")]
ENGINES = [name for name, service in SERVICES.items() if "vllm" in service["image"]]
CONFIG = "/etc/weir/weir.yaml"


def settings() -> config.Config:
    """The configuration that the service `weir` really runs with."""
    return config.load(ROOT / mounted("weir")[CONFIG], SERVICES["weir"]["environment"])


def mounted(service: str) -> dict[str, str]:
    """Where things are in a container, and what they are outside: a path of ours, or a volume's name."""
    return {target: source for source, target, *_ in (v.split(":") for v in SERVICES[service]["volumes"])}


def published(service: str) -> set[int]:
    return {int(port.rpartition(":")[2]) for port in SERVICES[service].get("ports", [])}


def test_it_fits_the_compose_specification() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    words = ["--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run([checker, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", OURS)
def test_our_services_run_commands_that_exist(service: str) -> None:
    assert not product.problems(SERVICES[service]["command"])


@pytest.mark.parametrize("service", [name for name in OURS if "-c" in SERVICES[name]["command"]])
def test_our_services_find_their_configuration(service: str) -> None:
    words = SERVICES[service]["command"]
    assert words[words.index("-c") + 1] == CONFIG
    assert CONFIG in mounted(service)


def test_the_configuration_is_legal_and_reaches_the_other_services() -> None:
    terms = settings()
    assert [*urls(terms.backends["gpu"].url)] == [("vllm", 8000, "")]
    assert [*urls(terms.backends["cheap"].url)] == [("cheap", 8001, "")]
    assert terms.quota_store.url == "redis://redis:6379/0"
    assert terms.ledger.url.endswith("@postgres:5432/weir")


def test_only_the_traffic_port_is_open_to_other_machines() -> None:
    open_ports = {
        (name, port) for name, service in SERVICES.items() for port in service.get("ports", []) if "127" not in port
    }
    assert open_ports == {("weir", "8080:8080")}


def test_the_published_ports_are_those_the_product_listens_on() -> None:
    terms = settings()
    assert published("weir") == {terms.listen.port, terms.admin.port}
    assert terms.admin.host == "0.0.0.0"


def test_the_journal_is_on_a_volume_of_its_own() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert "WEIR_LEDGER__JOURNAL_DIR=/var/lib/weir/journal" in dockerfile
    assert mounted("weir")["/var/lib/weir/journal"] == "journal"
    assert "journal" in read_yaml("docker-compose.yml")["volumes"]


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_is_there(service: str) -> None:
    volumes = read_yaml("docker-compose.yml")["volumes"]
    for source in mounted(service).values() if SERVICES[service].get("volumes") else []:
        assert (ROOT / source).exists() if source.startswith(".") else source in volumes, source


def test_there_is_an_engine_for_the_cpu_and_one_for_gpus() -> None:
    assert {tuple(SERVICES[name]["profiles"]) for name in ENGINES} == {("cpu",), ("gpu",)}
    (device,) = SERVICES["vllm-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("service", ENGINES)
def test_each_engine_is_the_backend_of_the_configuration(service: str) -> None:
    engine, terms = SERVICES[service], settings()
    assert "vllm" in engine["networks"]["default"]["aliases"]
    said = flags(engine["command"])
    assert said["served-model-name"] == terms.models["assistant"].primary[0].model
    assert "ports" not in engine, "callers must not get past weir"


@pytest.mark.parametrize("service", ENGINES)
def test_a_stop_lets_running_answers_finish(service: str) -> None:
    grace = settings().listen.grace_seconds
    patience = int(flags(SERVICES[service]["command"])["shutdown-timeout"])
    assert patience >= grace
    assert _seconds(SERVICES[service]["stop_grace_period"]) > patience
    assert _seconds(SERVICES["weir"]["stop_grace_period"]) > grace


def test_redis_forgets_nothing() -> None:
    words = SERVICES["redis"]["command"]
    assert words[words.index("--appendonly") + 1] == "yes"
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"
    assert "/data" in mounted("redis")


def test_the_schema_is_current_before_weir_starts() -> None:
    assert SERVICES["migrate"]["command"][0] == "migrate"
    assert SERVICES["weir"]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("service", [name for name in SERVICES if name not in ("weir", "migrate")])
def test_every_service_says_how_it_is_doing(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", sorted(weir_names("docker-compose.yml") | weir_names(".env.example")))
def test_every_variable_is_one_the_product_reads(name: str) -> None:
    assert product.reads(name)


def test_every_secret_is_in_the_example_of_the_environment() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    raw = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    asked = {part.split(":")[0].split("}")[0] for part in raw.split("${")[1:]}
    assert all(f"{name}=" in example for name in asked)


def test_prometheus_scrapes_what_is_there() -> None:
    jobs = {job["job_name"]: job["static_configs"] for job in read_yaml("deploy/prometheus.yml")["scrape_configs"]}
    terms = settings()
    assert jobs["weir"] == [{"targets": [f"weir:{terms.health.port}"]}]
    assert jobs["vllm"] == [{"targets": [terms.backends["gpu"].url.removeprefix("http://")]}]


def test_grafana_finds_its_data_and_its_dashboard() -> None:
    (source,) = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert [*urls(source["url"])] == [("prometheus", *published("prometheus"), "")]
    (provider,) = read_yaml("deploy/grafana/provisioning/dashboards/weir.yml")["providers"]
    inside = mounted("grafana")
    assert provider["options"]["path"] in inside
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / inside[provider["options"]["path"]] / Path(home).name).is_file()


def test_the_example_needs_no_environment() -> None:
    terms = config.load(ROOT / "deploy/weir.example.yaml", {})
    assert terms.tiers["standard"].policy == config.FileTier().policy, "the example shows the defaults as they are"
    assert terms.listen.port in published("weir")


def _seconds(period: str) -> int:
    number, unit = int(period[:-1]), period[-1]
    return number * {"s": 1, "m": 60}[unit]
