"""A fleet on Ray, on loopback: replicas are killed under streams, scaled with the load, and replaced by an update.

Members are oracles, which compute nothing, in real processes: the proof is about routing. Ray is imported by the
interpreter that runs the proof, or by the one that QUIRE_RAY_PYTHON names.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.record import say
from benchmarks.servers import free_port
from proofs.framework.proof import Proof, section
from quire.fleet.protocol.keys import make_keys
from quire.fleet.ray.config import GATEWAY, MEMBER, POLICY

PYTHON = "QUIRE_RAY_PYTHON"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
END_S = 60.0
TOKEN = "1f" * 32
RAY_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""As in docs/guides/fleet-ray.md."""
LOOK_S = 0.5
NUM_STREAMS = 16
NUM_TOKENS = 400
KILL_AFTER_S = 2.0
WITHOUT_RAY = (
    *("unequal", "moved", "moved_unequal", "lost", "move_gap_ms", "fleet_overhead_ttft", "fleet_throughput"),
    *("leave_ms", "reuse", "imbalance", "index_wrong", "netns_failures", "intruders", "vllm_member", "drained"),
)
"""Rows of this proof that do not need ray."""
MOVED = "quire:worker_restarts_total"
"""The gateway's metric that counts moved requests."""


def ray_python() -> str | None:
    """Return an interpreter that has ray, or None."""
    if find_spec("ray") is not None:
        return sys.executable
    return os.environ.get(PYTHON) or None


@dataclass
class StreamResult:
    """The text of one request, or its error."""

    text: str = ""
    problem: str = ""


@dataclass
class RayFleet:
    """A running fleet on Ray."""

    port: int
    ray_port: int
    """The port of Ray's dashboard, which has the HTTP interface of Ray Serve."""
    folder: Path
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)

    def serve(self, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of Ray Serve's applications; with a config, deploy it first. Raises OSError."""
        connection = HTTPConnection("127.0.0.1", self.ray_port, timeout=PATIENCE_S)
        method, body = ("GET", None) if config is None else ("PUT", json.dumps(config))
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        try:
            connection.request(method, "/api/serve/applications/", body, headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except HTTPException as error:
            raise OSError(f"Ray's interface: {error!r}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"Ray refused {method}: {answer.status} {text[:3000]}")
        return dict(json.loads(text or "{}"))

    def is_there(self) -> bool:
        """Whether Ray's interface responds."""
        try:
            self.serve()
        except OSError:
            return False
        return True

    def is_running(self) -> bool:
        """Whether the application is deployed. An unhealthy one has lost a replica, which Ray replaces."""
        application = self.serve().get("applications", {}).get("quire", {})
        if application.get("status") == "DEPLOY_FAILED":
            raise RuntimeError(f"the deployment failed: {application.get('message')}")
        return bool(application.get("status") == "RUNNING")

    def up(self, members: dict[str, Any], **args: Any) -> None:
        """Deploy oracles; changed arguments replace all replicas."""
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "quire",
                    "route_prefix": "/",
                    "import_path": "tests.support.fleet.ray_oracles:app",
                    "args": {
                        "model": "oracle",
                        "member_keys": str(self.folder / "keys" / "member.json"),
                        "gateway_keys": str(self.folder / "keys" / "gateway.json"),
                        "tokens_per_member": 200,
                        "settings": {"max_running": 8, "drain_s": 60, "port": self.port},
                        **args,
                    },
                    "deployments": [
                        {"name": MEMBER, "ray_actor_options": {"num_cpus": 0}, **members},
                        {"name": GATEWAY, "num_replicas": 1},
                    ],
                }
            ],
        }
        self.serve(config)
        self.until(self.is_running, "a deployment")

    def replicas(self, deployment: str = MEMBER) -> dict[str, int]:
        """Return the running replicas, with the id of Ray's process for each."""
        deployments = self.serve()["applications"]["quire"]["deployments"]
        found = deployments[deployment]["replicas"]
        return {one["replica_id"]: int(one["pid"]) for one in found if one["state"] == "RUNNING"}

    def running(self, deployment: str = MEMBER) -> set[str]:
        """Return the names of the running replicas."""
        return {*self.replicas(deployment)}

    def until(self, condition: Callable[[], bool], goal: str) -> float:
        """Wait for the condition, and return the seconds that it took."""
        start_s = time.monotonic()
        while not condition():
            if time.monotonic() - start_s > PATIENCE_S:
                raise TimeoutError(f"{goal} did not happen within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
        return time.monotonic() - start_s

    def until_replaced(self, replica: str, num_members: int) -> float:
        """Wait until so many members run without this one, and return the seconds that it took."""
        return self.until(lambda: len(self.running() - {replica}) == num_members, "a new member")

    def num_moved(self) -> int:
        """Return the number of moved requests by the gateway's metric."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        return sum(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(MOVED))

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, prompt: str, seed: int, num_tokens: int) -> StreamResult:
        """Stream one completion to its end."""
        result, is_done, reason = StreamResult(), False, None
        body = {"model": "oracle", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps({**body, "temperature": 0.8, "seed": seed}),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            if answer.status != 200:
                result.problem = f"{answer.status} {answer.read()[:200]!r}"
                return result
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    result.problem = str(piece["error"])
                for choice in piece.get("choices", ()):
                    result.text += choice["text"]
                    reason = choice["finish_reason"] or reason
        except (OSError, HTTPException, ValueError) as error:
            result.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if not result.problem and not (is_done and reason == "length"):
            result.problem = f"expected finish reason 'length', got {reason} after {len(result.text)} characters"
        return result

    def ask_all(self, seeds: Sequence[int], meanwhile: Callable[[], None] | None = None) -> list[StreamResult]:
        """Run streams concurrently; `meanwhile` is called once they have started."""
        results: list[StreamResult] = [StreamResult(problem="not asked")] * len(seeds)

        def run_one(index: int) -> None:
            results[index] = self.ask(f"stream {seeds[index]} begins", seeds[index], NUM_TOKENS)

        threads = [threading.Thread(target=run_one, args=(index,)) for index in range(len(seeds))]
        for thread in threads:
            thread.start()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            for thread in threads:
                thread.join()
        return results

    @contextmanager
    def under_load(self, num_clients: int, num_tokens: int) -> Iterator[list[int]]:
        """Run clients that send requests in a loop; yields a list whose one element counts the answers."""
        stop, num_answered = threading.Event(), [0]

        def client(number: int) -> None:
            while not stop.is_set():
                result = self.ask(f"client {number} asks number {num_answered[0]} {'again ' * 12}", number, num_tokens)
                num_answered[0] += 1
                if result.problem:
                    self.num_failed += 1
                    self.failures.append(result.problem)
                    stop.wait(0.2)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield num_answered
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def member_process(replica_pid: int) -> int:
    """Return the id of the member process that this Ray process of a replica has started."""
    threads = Path(f"/proc/{replica_pid}/task").glob("*/children")
    children = [int(pid) for thread in threads for pid in thread.read_text().split()]
    return next(pid for pid in children if b"oracle_replica" in Path(f"/proc/{pid}/cmdline").read_bytes())


@contextmanager
def ray_fleet(proof: Proof, python: str) -> Iterator[RayFleet]:
    """Start Ray on this machine, and stop it at the end."""
    folder = proof.folder / "ray"
    make_keys(folder / "keys")
    (folder / "token").write_text(TOKEN)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    overrides = {
        **RAY_VARIABLES,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "HOME": str(folder),
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "RAY_"))} | overrides
    fleet = RayFleet(free_port(), free_port(), folder)
    command = [
        *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={free_port()}", "--include-dashboard=true"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={fleet.ray_port}", f"--object-store-memory={128 << 20}"),
    ]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        fleet.until(fleet.is_there, "Ray")
        yield fleet
    finally:
        try:
            fleet.serve({"applications": []})
            fleet.until(lambda: not fleet.serve().get("applications"), "the end of the application")
        except (OSError, RuntimeError) as error:  # TimeoutError among them
            say(f"  {error}")
        head.terminate()
        try:
            head.wait(END_S)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()


@section("without ray")
def without_ray(proof: Proof) -> None:
    """All rows of this proof that do not need ray hold in an interpreter without ray."""
    before = proof.before or {"figures": {}, "broken": []}
    rows = {*before["figures"], *proof.figures}
    broken = {*before["broken"], *proof.broken} - (proof.figures.keys() - {*proof.broken})
    missing = [row for row in WITHOUT_RAY if row not in rows or row in broken]
    if missing:
        say(f"  missing or broken: {', '.join(missing)}")
    proof.holds("without_ray", find_spec("ray") is None and not missing, f"{len(WITHOUT_RAY)} rows without it")


@section("ray")
def ray(proof: Proof) -> None:
    """Killed replicas, autoscaling and a rolling update: no stream is lost, and no request fails."""
    python = ray_python()
    proof.report("ray_there", python is not None)
    if python is None:
        say(f"  no ray: install the extra quire[ray], or name an interpreter that has it in {PYTHON}")
        return
    with ray_fleet(proof, python) as fleet:
        began_s = time.monotonic()
        fleet.up(scaling(2, 2))
        proof.report("ray_up_s", time.monotonic() - began_s, "two oracles, Ray itself included")
        _kill_members(proof, fleet)
        _scale(proof, fleet)
        _update(proof, fleet)
        proof.equals("ray_scaled", fleet.num_failed, 0, "requests that failed while members were scaled and replaced")
        for failure in fleet.failures[:5]:
            say(f"  failed: {failure}")


def _kill_members(proof: Proof, fleet: RayFleet) -> None:
    """Kill Ray's process of a replica under streams, then the member process of another."""
    seeds = [proof.random.randrange(1 << 30) for _ in range(NUM_STREAMS)]
    expected = fleet.ask_all(seeds)
    num_lost, num_unequal = sum(bool(one.problem) for one in expected), 0
    say(f"  undisturbed: {[one.problem for one in expected if one.problem][:3]}")
    for kind in ("pid", "member_pid"):
        victim, pid = next(iter(fleet.replicas().items()))
        results = fleet.ask_all(seeds, partial(kill_soon, pid if kind == "pid" else member_process(pid)))
        num_lost += sum(bool(one.problem) for one in results)
        num_unequal += sum(a.text != b.text for a, b in zip(results, expected, strict=True))
        for problem in {one.problem for one in results} - {""}:
            say(f"  lost: {problem}")
        proof.report(f"ray_replaced_{kind}_s", fleet.until_replaced(victim, 2), "after the last stream")
    proof.report("ray_moved", fleet.num_moved(), "requests that went on with another member")
    proof.equals("ray_moves", num_lost, 0, f"of {NUM_STREAMS} streams lost, replica and member killed -9")
    proof.equals("ray_moves_unequal", num_unequal, 0, "streams whose text differs from an undisturbed run")


def scaling(at_least: int, at_most: int) -> dict[str, Any]:
    """Return autoscaling options with quire's policy and delays that are short enough for a test."""
    limits = {"min_replicas": at_least, "max_replicas": at_most, "upscale_delay_s": 2, "downscale_delay_s": 10}
    timing = {"metrics_interval_s": 1, "look_back_period_s": 3, "policy": {"policy_function": POLICY}}
    return {"num_replicas": "auto", "autoscaling_config": {**limits, **timing}}


def kill_soon(pid: int) -> None:
    """Kill the process while answers are streamed."""
    time.sleep(KILL_AFTER_S)
    os.kill(pid, signal.SIGKILL)


def _scale(proof: Proof, fleet: RayFleet) -> None:
    """Scale from one member to three under load, and back without load."""
    before = fleet.running()
    fleet.up(scaling(1, 1))
    fleet.until(lambda: len(fleet.running()) == 1, "one member")
    fleet.up(scaling(1, 3))
    proof.equals("ray_scaled_replaced", len(fleet.running() - before), 0, "members replaced by a change of the number")
    with fleet.under_load(32, 60) as num_answered:
        proof.report("ray_up_to_3_s", fleet.until(lambda: len(fleet.running()) == 3, "three members"))
        fleet.until(lambda: num_answered[0] > proof.sized(quick=200, full=2000), "answers")
    proof.report("ray_down_to_1_s", fleet.until(lambda: len(fleet.running()) == 1, "one member at rest"))
    proof.report("ray_scaled_requests", num_answered[0])


def _update(proof: Proof, fleet: RayFleet) -> None:
    """Deploy changed arguments under load: every member and the gateway must be replaced."""
    fleet.up(scaling(2, 2))
    fleet.until(lambda: len(fleet.running()) == 2, "two members")
    before, gateways = fleet.running(), fleet.running(GATEWAY)
    began_s = time.monotonic()
    with fleet.under_load(8, 60) as num_answered:
        fleet.until(lambda: num_answered[0] > 8, "answers")
        fleet.up(scaling(2, 2), name="oracle")
        fleet.until(lambda: len(fleet.running() - before) == 2, "two new members")
        fleet.until(lambda: not fleet.running(GATEWAY) & gateways, "a new gateway")
        num_expected = num_answered[0] + 16
        fleet.until(lambda: num_answered[0] > num_expected, "answers of the new ones")
    proof.equals("ray_updated_members", len(fleet.running() - before), 2)
    proof.equals("ray_updated_gateways", len(fleet.running(GATEWAY) - gateways), 1)
    proof.report("ray_update_s", time.monotonic() - began_s)
    proof.report("ray_update_requests", num_answered[0])
