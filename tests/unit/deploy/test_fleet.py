"""The manifests of a fleet say of quire only what is so: flags, ports, keys, names, and time to drain."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from quire.cli.fleet.commands import fleet_app
from quire.fleet.gateway.discovery import NamedMembers, parse_source
from quire.fleet.member.status import MemberStatus, encode_status
from quire.fleet.ray.config import MemberCount, read_args, serve_config
from quire.observe.metrics import Metrics, ModelSnapshot

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in documents("fleet.yaml") if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = document["spec"]["template"]["spec"]
    return pod


PODS = {
    "member": pod_of(named("StatefulSet", "quire-member")),
    "gateway": pod_of(named("Deployment", "quire-gateway")),
}


@pytest.fixture(autouse=True)
def _nobody_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in container["args"] if word.startswith("--"))


@pytest.mark.parametrize("name", PODS)
def test_containers_are_started_with_flags_that_the_command_has(name: str) -> None:
    (container,) = PODS[name]["containers"]
    assert container["command"] == ["quire", "fleet", name]
    command = typer.main.get_command(fleet_app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(flags(container)) <= known


@pytest.mark.parametrize("name", PODS)
def test_pods_are_nobody_mount_what_they_have_and_are_given_time_to_drain(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    pauses_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > float(flags(container)["--drain-s"]) + pauses_s
    own = named("StatefulSet", "quire-member")["spec"]["volumeClaimTemplates"] if name == "member" else []
    there = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in own}
    parts = (container, *pod.get("initContainers", ()))
    assert {mount["name"] for part in parts for mount in part["volumeMounts"]} == there


def test_members_and_gateways_have_their_own_keys_alone() -> None:
    secrets = {
        name: {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        for name, pod in PODS.items()
    }
    assert secrets == {"member": {"quire-member-keys"}, "gateway": {"quire-gateway-keys", "quire-keys"}}


def test_gateways_find_members_by_the_name_of_a_headless_service() -> None:
    service = named("Service", "quire-member")
    assert service["spec"]["clusterIP"] == "None"
    assert named("StatefulSet", "quire-member")["spec"]["serviceName"] == "quire-member"
    source = parse_source(flags(PODS["gateway"]["containers"][0])["--members"])
    (tokens, *_) = service["spec"]["ports"]
    assert source == NamedMembers("quire-member", tokens["port"])
    (member,) = PODS["member"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in member["ports"]}
    places = {"--listen": "tokens", "--events": "events", "--replay": "replay"}
    listens = {flag: f"tcp://0.0.0.0:{ports[name]}" for flag, name in places.items()}
    assert listens.items() <= flags(member).items()
    (allowed,) = named("NetworkPolicy", "quire-member")["spec"]["ingress"]
    assert {port["port"] for port in allowed["ports"]} == set(ports)


def test_probes_of_a_member_read_what_it_writes() -> None:
    (container,) = PODS["member"]["containers"]
    told = encode_status(MemberStatus("tcp://10.0.0.1:7000", "ready")).decode()
    for probe in ("startupProbe", "readinessProbe"):
        *_, wanted, file = container[probe]["exec"]["command"]
        assert wanted in told
        assert file == flags(container)["--status"]
    assert flags(container)["--status"] in container["livenessProbe"]["exec"]["command"][-1]


def test_members_are_scaled_by_metrics_that_gateways_have() -> None:
    metrics = Metrics()
    metrics.set_sources(lambda: [ModelSnapshot("m", 0, 0, 0.0, 1, 32, 0)])
    page = metrics.page().decode()
    (scaled,) = documents("fleet-keda.yaml")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    names = {part.partition("{")[0] for part in query.replace("sum(", "").split(" + ")}
    assert names == {"vllm:num_requests_waiting", "vllm:num_requests_running"}
    assert all(name in page for name in names)
    (pods,) = documents("fleet-hpa.yaml")
    assert scaled["spec"]["scaleTargetRef"] == pods["spec"]["scaleTargetRef"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == named("StatefulSet", "quire-member")["metadata"]["name"]


def test_the_ray_service_holds_a_config_of_ours_with_keys_and_rays_token() -> None:
    (service,) = documents("rayservice.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    args = read_args(application["args"])
    made = serve_config(args, MemberCount(2, 8), 2)
    assert config["http_options"] == made["http_options"]
    assert [one["name"] for one in application["deployments"]] == ["Member", "Gateway"]
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    (scaling,) = [one["autoscaling_config"] for one in application["deployments"] if "autoscaling_config" in one]
    assert (group["minReplicas"], group["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    pod = group["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args.settings["drain_s"]
    folders = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {str(Path(file).parent) for file in (args.member_keys, args.gateway_keys)} == {"/fleet"} <= folders
    assert str(Path(str(args.settings["keys_file"])).parent) in folders
