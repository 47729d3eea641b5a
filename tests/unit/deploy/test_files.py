"""The files of deploy/ parse, and say of quire only what is so."""

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from quire.config import SETTINGS, ServerSettings, load_settings
from quire.observe.metrics import Metrics, ModelSnapshot

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = [path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml")]


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_yaml_file_parses_to_something(path: Path) -> None:
    assert all(isinstance(one, dict) and one for one in documents(path))


def test_the_pod_is_probed_drains_and_is_nobody() -> None:
    kinds = {one["kind"]: one for one in documents(DEPLOY / "kubernetes" / "quire.yaml")}
    assert set(kinds) == {"Deployment", "Service", "PersistentVolumeClaim"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert pod["terminationGracePeriodSeconds"] > ServerSettings().drain_s
    assert pod["securityContext"]["runAsNonRoot"] is True
    mounted = {mount["name"] for part in (container, *pod["initContainers"]) for mount in part["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    _check_flags(container["args"][1:])


def test_metrics_of_a_pod_are_scraped_with_a_key() -> None:
    kinds = {one["kind"]: one for one in documents(DEPLOY / "kubernetes" / "quire.yaml")}
    pod, service = kinds["Deployment"]["spec"]["template"], kinds["Service"]
    assert not any("prometheus.io" in name for name in pod["metadata"].get("annotations", {}))
    (monitor,) = documents(DEPLOY / "kubernetes" / "monitor.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["type"] == "Bearer"
    assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def _check_flags(words: list[str]) -> None:
    known = {setting.flag for setting in SETTINGS}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_compose_file_starts_quire_with_keys_and_time_to_drain() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    quire = compose["services"]["quire"]
    _check_flags(quire["command"][1:])
    assert "--keys-file" in quire["command"]
    assert int(quire["stop_grace_period"].removesuffix("s")) > ServerSettings().drain_s
    assert all(port.startswith("127.0.0.1:") for one in compose["services"].values() for port in one.get("ports", ()))
    (scrape,) = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    assert scrape["metrics_path"] == "/metrics"


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "quire.json").read_text())
    metrics = Metrics()
    metrics.set_sources(lambda: [ModelSnapshot("m", 0, 0, 0.0, 1, 32, 0)])
    page = metrics.page().decode()
    named = {re.sub(r"_(bucket|total)$", "", name) for name in re.findall(r"(?:vllm|quire):\w+", json.dumps(dashboard))}
    assert len(named) > 10
    assert not [name for name in named if name not in page]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_unit_gives_requests_time_to_finish() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "quire.service").read_text())
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > ServerSettings().drain_s
    assert service["KillSignal"] == "SIGTERM"
    assert "quire serve" in service["ExecStart"]


def test_the_unit_and_every_container_of_ours_state_memory_and_processors() -> None:
    unit = (DEPLOY / "quire.service").read_text().splitlines()
    assert {"MemoryMax", "CPUQuota"} <= {line.partition("=")[0] for line in unit}
    (compose,) = documents(DEPLOY / "compose.yaml")
    assert {"mem_limit", "cpus"} <= set(compose["services"]["quire"])
    manifests = "\n".join(one.read_text() for one in DEPLOY.glob("kubernetes/*.yaml"))
    limits = re.findall(r"^ +limits: (.*)", manifests, re.MULTILINE)
    assert len(limits) == 5
    assert all("cpu:" in one and "memory:" in one for one in limits)


def test_the_unit_keeps_what_it_fetches_where_it_may_write() -> None:
    lines = (DEPLOY / "quire.service").read_text().splitlines()
    words = [word for line in lines if line.startswith("Environment=") for word in line.split("=", 1)[1].split()]
    told = dict(word.split("=", 1) for word in words)
    assert {"ProtectHome=true", "ProtectSystem=strict", "StateDirectory=quire", "CacheDirectory=quire"} <= set(lines)
    assert told["HF_HOME"].startswith("/var/lib/quire")
    assert told["QUIRE_CACHE"].startswith("/var/cache/quire")


def test_the_images_variables_are_settings() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    variables = dict(re.findall(r"(QUIRE_\w+)=(\S+)", dockerfile))
    settings = load_settings({}, environ={"HOME": "/", **variables})
    assert settings.server.log_format == "json"
    assert 'ENTRYPOINT ["quire", "serve"]' in dockerfile
