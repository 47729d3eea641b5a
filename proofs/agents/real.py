"""A small real model behind real agents: Qwen2.5-Coder-1.5B writes a program that prints ten Fibonacci numbers.

Whether the program is right depends on the model, and is only reported. The bounds: no run ends in a server error or in
a tool call that the agent cannot read. `quire launch`, which finds the server, runs the agents.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.packaged_models import coder_file
from benchmarks.record import ROOT, say
from proofs.agents.clients_run.agents import ALL_AGENTS
from proofs.agents.clients_run.libraries import PYTHON
from proofs.agents.clients_run.packages import NotInstalledError, PackageGroup, installed
from proofs.agents.clients_run.runs import ClientRun, Invocation, Workspace, run_client
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section

NAME = "coder"
FILE = "fibonacci.py"
TASK = f"Write a file {FILE} with a Python program that prints the first ten Fibonacci numbers. Do nothing else."
NUMBERS = ([0, 1, 1, 2, 3, 5, 8, 13, 21, 34], [1, 1, 2, 3, 5, 8, 13, 21, 34, 55])
RUN_S = 1200.0
PROGRAM_S = 20.0
SDK_AGENT = """
from pathlib import Path
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI
set_tracing_disabled(True)
def write_file(path: str, content: str) -> str:
    "Write a text file in the current folder. Its content is written as it is."
    Path(Path(path).name).write_text(content)
    return "written"
model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, timeout=1200, max_retries=0))
tools = [function_tool(write_file, failure_error_function=None)]
agent = Agent("helper", instructions="You write files with your tool.", tools=tools, model=model,
              model_settings=ModelSettings(max_tokens=1000))
try:
    final(Runner.run_sync(agent, TASK, max_turns=6).final_output)
except MaxTurnsExceeded as error:
    final(error)
"""


@dataclass(frozen=True, slots=True)
class RealAgent:
    """An agent to run with the real model."""

    title: str
    group: str
    invocation: Callable[[PackageGroup, Workspace], Invocation]
    count_malformed: Callable[[ClientRun], int]
    """Counts the calls that the agent could not read."""


def _launch_command(name: str, arguments: Sequence[str]) -> Callable[[PackageGroup, Workspace], Invocation]:
    def invocation(group: PackageGroup, workspace: Workspace) -> Invocation:
        runtime = str(workspace.folder.parent / "runtime")
        variables = {"XDG_RUNTIME_DIR": runtime, "PYTHONPATH": str(ROOT / "src")}
        return Invocation([sys.executable, "-m", "quire", "launch", name, "--", *arguments], variables, group.programs)

    return invocation


def _sdk_command(group: PackageGroup, workspace: Workspace) -> Invocation:
    script = workspace.folder / "agent.py"
    script.write_text(PYTHON + SDK_AGENT)
    variables = {"CLIENT_URL": workspace.url, "CLIENT_MODEL": NAME, "CLIENT_TASK": TASK, "CLIENT_KEY": "none"}
    return Invocation([str(group.programs / "python"), str(script)], variables, group.programs)


def _invalid_tools(run: ClientRun) -> int:
    """opencode reports a call that it cannot read, or of an unknown tool, as a call of the tool `invalid`."""
    events = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    return sum(event.get("part", {}).get("tool") == "invalid" for event in events)


_AIDER = next(agent for agent in ALL_AGENTS if agent.group == "aider")
REAL_AGENTS = (
    RealAgent("opencode", "opencode", _launch_command("opencode", ("run", "--format", "json", TASK)), _invalid_tools),
    RealAgent("aider", "aider", _launch_command("aider", _AIDER.task_words(TASK)), lambda _run: 0),
    RealAgent("openai-agents", "openai-agents", _sdk_command, lambda run: "ModelBehaviorError" in run.errors),
)


def prints_fibonacci(folder: Path) -> bool:
    """Whether the folder has a program that prints the numbers in their order and no others."""
    path = folder / FILE
    if not path.is_file():
        return False
    try:
        command = [sys.executable, "-I", str(path)]
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S)
    except subprocess.TimeoutExpired:
        return False
    return process.returncode == 0 and [*map(int, re.findall(r"-?\d+", process.stdout))] in NUMBERS


def server_errors(server: Server, num_before: int) -> list[dict[str, Any]]:
    """Access-log lines of requests that were refused or broke off."""
    return [line for line in server.access_lines()[num_before:] if line["status"] >= 400 or "error" in line]


@section("real model")
def real_model(proof: Proof) -> None:
    """Run each agent several times, one after the other."""
    num_tries = proof.sized(quick=1, full=3)
    runtime = proof.folder / "runtime" / "quire"
    runtime.mkdir(parents=True, mode=0o700)
    options = (str(coder_file()), "--served-model-name", NAME, "--memory", "8GiB")
    num_runs = num_successes = num_errors = num_malformed = 0
    with started(proof.folder, *options, module="quire serve") as server:
        (runtime / "admin-1.sock").symlink_to(server.admin_path)
        for agent in REAL_AGENTS:
            try:
                group = installed(agent.group)
            except NotInstalledError as error:
                say(f"    {error}")
                continue
            num_good = 0
            for number in range(num_tries):
                workspace = Workspace.create(proof.folder / f"{agent.group}-{number}", server.url, NAME)
                num_before = len(server.access_lines())
                run = run_client(workspace, agent.invocation(group, workspace), RUN_S)
                errors, malformed = server_errors(server, num_before), agent.count_malformed(run)
                is_good = prints_fibonacci(workspace.work)
                num_runs, num_good = num_runs + 1, num_good + is_good
                num_errors, num_malformed = num_errors + bool(errors), num_malformed + bool(malformed)
                num_requests = len(server.access_lines()) - num_before
                say(f"    {agent.title}: {is_good}, {num_requests} requests, {run.took_s:.0f} s, exit code {run.code}")
                if errors or malformed or run.code:
                    say(f"    {errors}, {malformed} malformed: {run.output_end}")
            proof.report(f"real_{agent.group.replace('-', '_')}", num_good, f"of {num_tries}")
            num_successes += num_good
        num_restarts = server.num_restarts()
    proof.equals("real_runs", num_runs, num_tries * len(REAL_AGENTS))
    proof.report("agents_real_model", num_successes, f"of {num_runs} wrote the program")
    proof.equals("real_server_errors", num_errors + num_restarts, 0, "runs with an error, and workers replaced")
    proof.equals("real_malformed_calls", num_malformed, 0, "runs with such a call")
