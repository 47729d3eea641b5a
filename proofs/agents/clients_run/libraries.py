"""The twelve client libraries: for each a program of a few lines, like those of its documentation, with one tool.

The tool is a function of the program that returns a secret. An answer with the secret shows that the call was parsed
and run, and that its result was sent back. Programs run in the folders of `clients_run/packages`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from proofs.agents.clients_run.packages import PackageGroup
from proofs.agents.clients_run.runs import ClientRun, Invocation, Workspace, nonce, run_client

FINAL = "FINAL "
"""The prefix of each line with a final answer."""
PYTHON = """
import os
URL, MODEL, TASK = (os.environ[name] for name in ("CLIENT_URL", "CLIENT_MODEL", "CLIENT_TASK"))
KEY = os.environ["CLIENT_KEY"]
def lookup(key: str) -> str:
    "Look something up by its key."
    return os.environ["CLIENT_SECRET"] + "-" + key
def final(text): print("FINAL", " ".join(str(text).split()))
"""
TOOL = """
TOOL = {"type": "function", "function": {"name": "lookup", "description": "Look something up by its key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}
"""
LLM_FUNCTIONS = """
import os
def lookup(key: str) -> str:
    "Look something up by its key."
    return os.environ["CLIENT_SECRET"] + "-" + key
"""
OPENAI_AGENTS = """
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL + "/v1", api_key=KEY)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    agent = Agent("helper", instructions="Be brief.", tools=[function_tool(lookup)], model=kind(MODEL, client))
    final(Runner.run_sync(agent, TASK).final_output)
"""
LANGCHAIN = """
import asyncio
from langchain.agents import create_agent
def ask(model):
    agent = create_agent(model, tools=[lookup])
    asked = {"messages": [{"role": "user", "content": TASK}]}
    final(agent.invoke(asked)["messages"][-1].text)
    final(list(agent.stream(asked, stream_mode="values"))[-1]["messages"][-1].text)
"""
LANGCHAIN_OPENAI = """
from langchain_openai import ChatOpenAI
ask(ChatOpenAI(model=MODEL, base_url=URL + "/v1", api_key=KEY, max_retries=0))
"""
LANGCHAIN_ANTHROPIC = """
from langchain_anthropic import ChatAnthropic
ask(ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0))
"""
LLAMA_INDEX = """
import asyncio
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model=MODEL, api_base=URL + "/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
                 context_window=32768, max_retries=0)
async def main():
    final(await FunctionAgent(tools=[lookup], llm=llm).run(TASK))
asyncio.run(main())
"""
LITELLM = """
import json, litellm
litellm.telemetry = False
def ask(model, base):
    messages = [{"role": "user", "content": TASK}]
    for _ in range(3):
        given = dict(model=model, api_base=base, api_key=KEY, tools=[TOOL], max_tokens=400, max_retries=0)
        message = litellm.completion(messages=messages, **given).choices[0].message
        if not message.tool_calls:
            return final(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""
INSTRUCTOR = """
import instructor, openai
from pydantic import BaseModel
class City(BaseModel):
    name: str
    population: int
client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0))
asked = [{"role": "user", "content": TASK}]
city = client.chat.completions.create(model=MODEL, response_model=City, messages=asked, max_retries=0)
final(f"{city.name} {city.population + 1}")
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=URL + "/v1", api_key=KEY)
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    final(Agent(kind(MODEL, provider=provider), tools=[lookup]).run_sync(TASK).output)
"""
AI_SDK = """
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
const { CLIENT_URL: url, CLIENT_MODEL: name, CLIENT_TASK: prompt, CLIENT_KEY: apiKey } = process.env;
const final = (text) => console.log("FINAL", text.split(/\\s+/).join(" "));
const lookup = tool({ description: "Look something up by its key.", inputSchema: z.object({ key: z.string() }),
  execute: async ({ key }) => process.env.CLIENT_SECRET + "-" + key });
const ask = async (model) => {
  const given = { model, prompt, tools: { lookup }, stopWhen: stepCountIs(4), maxRetries: 0 };
  final((await generateText(given)).text);
  let text = "";
  for await (const part of streamText(given).textStream) text += part;
  final(text);
};
"""
AI_SDK_COMPATIBLE = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
await ask(createOpenAICompatible({ name: "quire", baseURL: url + "/v1", apiKey })(name));
"""
AI_SDK_OPENAI = """
import { createOpenAI } from "@ai-sdk/openai";
await ask(createOpenAI({ baseURL: url + "/v1", apiKey })(name));
"""
AI_SDK_ANTHROPIC = """
import { createAnthropic } from "@ai-sdk/anthropic";
await ask(createAnthropic({ baseURL: url + "/v1", apiKey })(name));
"""


@dataclass(frozen=True, slots=True)
class Library:
    """A library and the program that uses it."""

    title: str
    group: str
    package: str
    program: str
    num_finals: int
    """The number of final answers that the program prints, one for each way to ask."""
    apis: str
    """The APIs that it uses, for the table of clients."""
    has_final_text: bool = True
    """Whether the library sends the tool's result back and gets a final text."""


CHAT, RESPONSES, MESSAGES = "chat", "Responses", "Messages"
LIBRARIES = (
    Library("llm", "llm", "llm", "", 1, CHAT),
    Library("openai-agents", "openai-agents", "openai-agents", PYTHON + OPENAI_AGENTS, 2, f"{CHAT}, {RESPONSES}"),
    Library("LangChain ChatOpenAI", "langchain", "langchain-openai", PYTHON + LANGCHAIN + LANGCHAIN_OPENAI, 2, CHAT),
    Library(
        "LangChain ChatAnthropic",
        "langchain",
        "langchain-anthropic",
        PYTHON + LANGCHAIN + LANGCHAIN_ANTHROPIC,
        2,
        MESSAGES,
    ),
    Library("LlamaIndex OpenAILike", "llama-index", "llama-index-llms-openai-like", PYTHON + LLAMA_INDEX, 1, CHAT),
    Library(
        "LiteLLM openai/",
        "litellm",
        "litellm",
        PYTHON + TOOL + LITELLM + 'ask("openai/" + MODEL, URL + "/v1")\n',
        1,
        CHAT,
    ),
    Library(
        "LiteLLM anthropic/",
        "litellm",
        "litellm",
        PYTHON + TOOL + LITELLM + 'ask("anthropic/" + MODEL, URL)\n',
        1,
        MESSAGES,
    ),
    Library("instructor", "instructor", "instructor", PYTHON + INSTRUCTOR, 1, CHAT, has_final_text=False),
    Library("pydantic-ai", "pydantic-ai", "pydantic-ai-slim[openai]", PYTHON + PYDANTIC_AI, 2, f"{CHAT}, {RESPONSES}"),
    Library("AI SDK openai-compatible", "ai-sdk", "@ai-sdk/openai-compatible", AI_SDK + AI_SDK_COMPATIBLE, 2, CHAT),
    Library("AI SDK openai", "ai-sdk", "@ai-sdk/openai", AI_SDK + AI_SDK_OPENAI, 2, RESPONSES),
    Library("AI SDK anthropic", "ai-sdk", "@ai-sdk/anthropic", AI_SDK + AI_SDK_ANTHROPIC, 2, MESSAGES),
)


@dataclass(frozen=True, slots=True)
class LibraryTask:
    """The task of a library, and the text that its answers must have."""

    task: str
    variables: Mapping[str, str]
    expected: str

    @classmethod
    def create(cls, library: Library) -> "LibraryTask":
        """Make a task with random words that no model can guess."""
        key, secret = nonce(), nonce()
        if library.group == "instructor":
            return cls(f"Call the tool City with the name {key} and the population 41.", {}, f"{key} 42")
        task = f"Call the tool lookup with the key {key} and tell me what it says."
        return cls(task, {"CLIENT_SECRET": secret}, f"{secret}-{key}")


def ask_library(library: Library, group: PackageGroup, workspace: Workspace) -> tuple[ClientRun, str | None]:
    """Run the library's program; return the run, and a message about what went wrong or None."""
    library_task = LibraryTask.create(library)
    server_variables = {"CLIENT_URL": workspace.url, "CLIENT_MODEL": workspace.model, "CLIENT_KEY": workspace.key}
    invocation = _invocation(library, group, workspace, library_task.task)
    variables = {**server_variables, "CLIENT_TASK": library_task.task, **library_task.variables, **invocation.variables}
    run = run_client(workspace, Invocation(invocation.words, variables, group.programs))
    final_lines = [line.removeprefix(FINAL) for line in run.output.splitlines() if line.startswith(FINAL)]
    finals = [run.output] if library.group == "llm" else final_lines
    num_correct = sum(library_task.expected in answer for answer in finals)
    if run.code or num_correct < library.num_finals:
        return run, f"{num_correct} of {library.num_finals} answers have the tool's text: {run.output_end}"
    return run, None


def _invocation(library: Library, group: PackageGroup, workspace: Workspace, task: str) -> Invocation:
    if library.group == "llm":
        return _llm(group, workspace, task)
    if group.source == "npm":
        (workspace.work / "node_modules").symlink_to(group.folder / "node_modules")
        script = workspace.work / "client.mjs"
        words = ["node", str(script)]
    else:
        script = workspace.work / "client.py"
        words = [str(group.programs / "python"), str(script)]
    script.write_text(library.program)
    return Invocation(words)


def _llm(group: PackageGroup, workspace: Workspace, task: str) -> Invocation:
    functions = workspace.work / "functions.py"
    functions.write_text(LLM_FUNCTIONS)
    model = {"model_id": workspace.model, "model_name": workspace.model, "api_base": f"{workspace.url}/v1"}
    home = workspace.folder / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(json.dumps([{**model, "supports_tools": True}]))
    words = [str(group.programs / "llm"), "-m", workspace.model, "--functions", str(functions), task]
    return Invocation(words, {"LLM_USER_PATH": str(home)})
