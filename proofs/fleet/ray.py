"""A fleet on Ray, on loopback: a replica is killed under streams, members come and go with the load, all are replaced.

Members are oracles in real processes: what is proved is who is asked when, not arithmetic. Ray is looked for in the
interpreter that runs the proof, and in the one that QUIRE_RAY_PYTHON names.
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
ENVIRON = {
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
"""Rows of a fleet that nobody needs ray for."""
MOVED = "quire:worker_restarts_total"
"""A gateway counts there what had to go on elsewhere."""


def ray_python() -> str | None:
    """The interpreter that has ray."""
    if find_spec("ray") is not None:
        return sys.executable
    return os.environ.get(PYTHON) or None


@dataclass
class Asked:
    """What became of one request."""

    text: str = ""
    problem: str = ""


@dataclass
class RayFleet:
    """One that runs."""

    port: int
    ray_port: int
    """Of its dashboard, which has Serve's HTTP interface."""
    folder: Path
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)

    def serve(self, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is deployed, by Ray's own interface; with a config, deploy it. Raises OSError."""
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
        """Whether the application is deployed. One that is unhealthy has lost a replica, and gets another."""
        found = self.serve().get("applications", {}).get("quire", {})
        if found.get("status") == "DEPLOY_FAILED":
            raise RuntimeError(f"the deployment failed: {found.get('message')}")
        return bool(found.get("status") == "RUNNING")

    def up(self, members: dict[str, Any], **args: Any) -> None:
        """Deploy oracles; other arguments than before replace all replicas."""
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
        """Those that run, with the id of Ray's process of each."""
        deployments = self.serve()["applications"]["quire"]["deployments"]
        found = deployments[deployment]["replicas"]
        return {one["replica_id"]: int(one["pid"]) for one in found if one["state"] == "RUNNING"}

    def running(self, deployment: str = MEMBER) -> set[str]:
        """Their names."""
        return {*self.replicas(deployment)}

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """How long it took."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > PATIENCE_S:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

    def until_replaced(self, replica: str, num_members: int) -> float:
        """How long until so many run, and this one is none of them."""
        return self.until(lambda: len(self.running() - {replica}) == num_members, "a new member")

    def num_moved(self) -> int:
        """As the gateway counts it."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        return sum(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(MOVED))

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, prompt: str, seed: int, num_tokens: int) -> Asked:
        """One streamed completion, to its end."""
        asked, is_done, reason = Asked(), False, None
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
                asked.problem = f"{answer.status} {answer.read()[:200]!r}"
                return asked
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    asked.problem = str(piece["error"])
                for choice in piece.get("choices", ()):
                    asked.text += choice["text"]
                    reason = choice["finish_reason"] or reason
        except (OSError, HTTPException, ValueError) as error:
            asked.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if not asked.problem and not (is_done and reason == "length"):
            asked.problem = f"it ended early, as {reason}, after {len(asked.text)} characters"
        return asked

    def ask_all(self, seeds: Sequence[int], meanwhile: Callable[[], None] | None = None) -> list[Asked]:
        """Streams beside each other; `meanwhile` is done once they run."""
        found: list[Asked] = [Asked(problem="not asked")] * len(seeds)

        def one(at: int) -> None:
            found[at] = self.ask(f"stream {seeds[at]} begins", seeds[at], NUM_TOKENS)

        threads = [threading.Thread(target=one, args=(at,)) for at in range(len(seeds))]
        for thread in threads:
            thread.start()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            for thread in threads:
                thread.join()
        return found

    @contextmanager
    def under_load(self, num_clients: int, num_tokens: int) -> Iterator[list[int]]:
        """Clients that ask again and again; yields how many answers there were, in one number that grows."""
        is_over, num_answered = threading.Event(), [0]

        def client(number: int) -> None:
            while not is_over.is_set():
                asked = self.ask(f"client {number} asks number {num_answered[0]} {'again ' * 12}", number, num_tokens)
                num_answered[0] += 1
                if asked.problem:
                    self.num_failed += 1
                    self.failures.append(asked.problem)
                    is_over.wait(0.2)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield num_answered
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


def member_process(replica_pid: int) -> int:
    """The member's own process, which Ray's process of the replica looks after."""
    threads = Path(f"/proc/{replica_pid}/task").glob("*/children")
    children = [int(pid) for thread in threads for pid in thread.read_text().split()]
    return next(pid for pid in children if b"oracle_replica" in Path(f"/proc/{pid}/cmdline").read_bytes())


@contextmanager
def ray_fleet(proof: Proof, python: str) -> Iterator[RayFleet]:
    """Ray on this machine, ended with the proof."""
    folder = proof.folder / "ray"
    make_keys(folder / "keys")
    (folder / "token").write_text(TOKEN)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    own = {
        **ENVIRON,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "HOME": str(folder),
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "RAY_"))} | own
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
    """All other rows hold where this interpreter, which ran them, cannot import ray."""
    before = proof.before or {"figures": {}, "broken": []}
    rows = {*before["figures"], *proof.figures}
    broken = {*before["broken"], *proof.broken} - (proof.figures.keys() - {*proof.broken})
    missing = [row for row in WITHOUT_RAY if row not in rows or row in broken]
    if missing:
        say(f"  not there, or broken: {', '.join(missing)}")
    proof.holds("without_ray", find_spec("ray") is None and not missing, f"{len(WITHOUT_RAY)} rows without it")


@section("ray")
def ray(proof: Proof) -> None:
    """Killed replicas, the load, and a rolling update: nothing is lost, and nothing fails."""
    python = ray_python()
    proof.report("ray_there", python is not None)
    if python is None:
        say(f"  no ray: install the extra quire[ray], or name an interpreter that has it in {PYTHON}")
        return
    with ray_fleet(proof, python) as fleet:
        began_s = time.monotonic()
        fleet.up(scaling(2, 2))
        proof.report("ray_up_s", time.monotonic() - began_s, "two oracles, Ray itself included")
        _moves(proof, fleet)
        _scaled(proof, fleet)
        _updated(proof, fleet)
        proof.equals("ray_scaled", fleet.num_failed, 0, "requests that failed while members came, went, were replaced")
        for failure in fleet.failures[:5]:
            say(f"  failed: {failure}")


def _moves(proof: Proof, fleet: RayFleet) -> None:
    """Ray's process that looks after a member is killed, then a member's own: both under streams."""
    seeds = [proof.random.randrange(1 << 30) for _ in range(NUM_STREAMS)]
    expected = fleet.ask_all(seeds)
    num_lost, num_other = sum(bool(one.problem) for one in expected), 0
    say(f"  undisturbed: {[one.problem for one in expected if one.problem][:3]}")
    for which in ("pid", "member_pid"):
        victim, replica_pid = next(iter(fleet.replicas().items()))
        found = fleet.ask_all(seeds, partial(kill_soon, replica_pid if which == "pid" else member_process(replica_pid)))
        num_lost += sum(bool(one.problem) for one in found)
        num_other += sum(one.text != other.text for one, other in zip(found, expected, strict=True))
        for problem in {one.problem for one in found} - {""}:
            say(f"  lost: {problem}")
        proof.report(f"ray_replaced_{which}_s", fleet.until_replaced(victim, 2), "after the last stream")
    proof.report("ray_moved", fleet.num_moved(), "requests that went on with another member")
    proof.equals("ray_moves", num_lost, 0, f"of {NUM_STREAMS} streams lost, replica and member killed -9")
    proof.equals("ray_moves_unequal", num_other, 0, "that went on with other text than undisturbed")


def scaling(at_least: int, at_most: int) -> dict[str, Any]:
    """By our policy, and sooner than anybody would want it."""
    wanted = {"min_replicas": at_least, "max_replicas": at_most, "upscale_delay_s": 2, "downscale_delay_s": 10}
    often = {"metrics_interval_s": 1, "look_back_period_s": 3, "policy": {"policy_function": POLICY}}
    return {"num_replicas": "auto", "autoscaling_config": {**wanted, **often}}


def kill_soon(pid: int) -> None:
    """In the middle of answers."""
    time.sleep(KILL_AFTER_S)
    os.kill(pid, signal.SIGKILL)


def _scaled(proof: Proof, fleet: RayFleet) -> None:
    """From one member to three with the load, and back without it."""
    before = fleet.running()
    fleet.up(scaling(1, 1))
    fleet.until(lambda: len(fleet.running()) == 1, "one member")
    fleet.up(scaling(1, 3))
    proof.equals("ray_scaled_replaced", len(fleet.running() - before), 0, "members that another number replaced")
    with fleet.under_load(32, 60) as num_answered:
        proof.report("ray_up_to_3_s", fleet.until(lambda: len(fleet.running()) == 3, "three members"))
        fleet.until(lambda: num_answered[0] > proof.sized(quick=200, full=2000), "answers")
    proof.report("ray_down_to_1_s", fleet.until(lambda: len(fleet.running()) == 1, "one member at rest"))
    proof.report("ray_scaled_requests", num_answered[0])


def _updated(proof: Proof, fleet: RayFleet) -> None:
    """Other arguments: every member and the gateway are replaced, under load."""
    fleet.up(scaling(2, 2))
    fleet.until(lambda: len(fleet.running()) == 2, "two members")
    before, gateways = fleet.running(), fleet.running(GATEWAY)
    began_s = time.monotonic()
    with fleet.under_load(8, 60) as num_answered:
        fleet.until(lambda: num_answered[0] > 8, "answers")
        fleet.up(scaling(2, 2), name="oracle")
        fleet.until(lambda: len(fleet.running() - before) == 2, "two new members")
        fleet.until(lambda: not fleet.running(GATEWAY) & gateways, "a new gateway")
        enough = num_answered[0] + 16
        fleet.until(lambda: num_answered[0] > enough, "answers of the new ones")
    proof.equals("ray_updated_members", len(fleet.running() - before), 2)
    proof.equals("ray_updated_gateways", len(fleet.running(GATEWAY) - gateways), 1)
    proof.report("ray_update_s", time.monotonic() - began_s)
    proof.report("ray_update_requests", num_answered[0])
