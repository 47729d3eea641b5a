"""What ends runs: loops are cut and nothing else is; no broken call in a history is an error.

Texts come from the files of installed packages and from a generator. A text that is stopped although the rule is met is
listed: it repeats itself, as some tables do.
"""

import asyncio
import json
import site
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import aiohttp

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, phrase, serve_words, started
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_source import published_templates
from quire.checkpoints import load_tokenizer
from quire.client.reply.loops import MAX_PERIOD, LoopDetector, min_loop_tokens
from quire.client.request.conversation import ToolUse, chat_prompt, tools_of
from quire.client.request.text_model import TextModel
from quire.errors import QuireError
from quire.text.chat.rendering.template import ChatTemplate
from tests.support.servers.talkers import talker
from tests.support.servers.tool_formats import USER, Message, call, calling, result

SUFFIXES = (".py", ".json", ".md", ".txt", ".csv", ".html", ".rst", ".h")
TEXT_CHARS = 6000
OPEN_REQUESTS = 16
NOT_BROKEN = ("fireworks-ai-llama-3-firefunction-v2",)
"""Templates that need arguments of their own and reject every conversation here."""


def stop_of(tokens: Sequence[int]) -> int | None:
    """How many tokens there are when the detector ends them."""
    detector = LoopDetector()
    return next((at for at, token in enumerate(tokens, 1) if detector.push(token, is_forced=False)), None)


def period_at_end(tokens: Sequence[int]) -> int | None:
    """The smallest period with which the tokens end as a loop, by the rule itself."""
    for period in range(1, MAX_PERIOD + 1):
        end = tokens[-min_loop_tokens(period) :]
        if len(end) == min_loop_tokens(period) and end[period:] == end[:-period]:
            return period
    return None


@section("loops")
def loops(proof: Proof) -> None:
    """Made loops over all periods, texts, and the test model."""
    missed = false = 0
    stopped = list[str]()
    for number in range(proof.sized(quick=128, full=500)):
        period = number % MAX_PERIOD + 1
        pattern = [proof.random.randrange(1000, 1000 + max(2, period)) for _ in range(period)]
        before = [proof.random.randrange(1000) for _ in range(proof.random.randrange(600))]
        stop = stop_of([*before, *(pattern * (min_loop_tokens(period) // period + 3))])
        missed += stop is None or stop > len(before) + min_loop_tokens(period) + 2 * period
    encode = load_tokenizer(smollm2_directory() / "tokenizer.json").encode
    for name, text in texts(proof.random, proof.sized(quick=300, full=10_000)):
        ids = encode(text, add_special_tokens=False).ids
        if (stop := stop_of(ids)) is not None:
            stopped.append(name)
            false += period_at_end(ids[:stop]) is None
    with started(proof.folder, *serve_words("--max-running", str(OPEN_REQUESTS)), module="quire serve") as server:
        greedy, sampled = asyncio.run(_answers(server, proof))
    for free, cut in greedy:
        stop = next((at for at in range(1, len(free) + 1) if period_at_end(free[:at]) is not None), None)
        missed += stop is not None and (
            len(cut) > stop + 2 * (period_at_end(free[:stop]) or 0) or cut != free[: len(cut)]
        )
        false += stop is None and len(cut) != len(free)
    for prompt, (ids, is_cut) in sampled.items():
        stopped += [prompt] * is_cut
        false += is_cut and period_at_end(ids) is None
    for name in stopped:
        say(f"    stopped: {name}")
    num_real = sum(len(cut) < len(free) for free, cut in greedy)
    proof.at_least("loops_real", num_real, proof.sized(quick=1, full=200), "of the test model at temperature 0")
    proof.equals("loops_missed", missed, 0, "not cut at most two periods after the rule is met")
    proof.equals("loops_false", false, 0, "stopped although the rule is not met")
    proof.at_most("loops_stopped", len(stopped), 5, "texts and sampled answers that were stopped")


def texts(random: Random, count: int) -> Iterator[tuple[str, str]]:
    """Half from files of installed packages, half generated: tables, JSON, numbers, poems."""
    files = sorted(path for path in Path(site.getsitepackages()[0]).rglob("*") if path.suffix in SUFFIXES)
    while count > 0:
        path = random.choice(files)
        text = path.read_text(errors="replace")
        at = random.randrange(max(1, len(text) - TEXT_CHARS))
        rows = [(number, phrase(random, 3), random.random()) for number in range(random.randrange(5, 120))]
        kind = random.choice(("table", "json", "numbers", "poem"))
        made = {
            "table": "\n".join(f"| {number} | {name} | {share:.2f} |" for number, name, share in rows),
            "json": json.dumps([{"id": number, "name": name, "is_open": share > 0.5} for number, name, share in rows]),
            "numbers": " ".join(str(number * 7) for number, _, _ in rows),
            "poem": "\n".join(f"O {name},\nthe {name} is here" for _, name, _ in rows),
        }[kind]
        yield from ((f"{path.name} at {at}", text[at : at + TEXT_CHARS]), (kind, made))
        count -= 2


Greedy = list[tuple[list[int], list[int]]]


async def _answers(server: Server, proof: Proof) -> tuple[Greedy, dict[str, tuple[list[int], bool]]]:
    """Tokens of greedy answers, free and cut; and of sampled answers, with whether they were cut."""
    gate = asyncio.Semaphore(OPEN_REQUESTS)
    prompts = [phrase(proof.random, 3) for _ in range(300)]

    async def ids_of(prompt: str, is_greedy: bool, stop_loops: bool = True) -> tuple[list[int], bool]:
        """A greedy answer continues a text, which is often a loop; a sampled one answers in a chat."""
        question = {
            "messages": [{"role": "user", "content": f"Tell me something about a {prompt}."}],
            "temperature": 0.8,
        }
        body = {"prompt": prompt, "temperature": 0} if is_greedy else question
        path = "/v1/completions" if is_greedy else "/v1/chat/completions"
        body |= {"stop_loops": stop_loops, "max_tokens": proof.sized(quick=400, full=900), "return_token_ids": True}
        async with gate, session.post(server.url + path, json=body) as reply:
            (choice,) = (await reply.json())["choices"]
            return choice["token_ids"], "finish_detail" in choice

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=7200)) as session:
        few = prompts[: proof.sized(quick=6, full=300)]
        free, cut = [await asyncio.gather(*(ids_of(one, True, stops) for one in few)) for stops in (False, True)]
        many = prompts[: proof.sized(quick=6, full=300)]
        sampled = await asyncio.gather(*(ids_of(one, False) for one in many))
    pairs = [(ids, cut_ids) for (ids, _), (cut_ids, _) in zip(free, cut, strict=True)]
    return pairs, dict(zip(many, sampled, strict=True))


@section("histories")
def histories(proof: Proof) -> None:
    """Broken histories over published templates, as the routes render them."""
    names = [path.stem for path in sorted(published_templates().glob("*.jinja")) if path.stem not in NOT_BROKEN]
    base, tools = talker(2048, max_sequence_tokens=8192, max_bytes=64_000).text, tools_of(TOOLS)
    refused, num_rendered = list[str](), 0
    made = [broken_history(proof.random) for _ in range(proof.sized(quick=25, full=500))]
    for name in proof.random.sample(names, 20):
        template = ChatTemplate(
            (published_templates() / f"{name}.jinja").read_text(), {"bos_token": "", "eos_token": ""}
        )
        model = TextModel(name, base.info, base.tokenizer, template, base.eos_token_ids, {})
        for history in made:
            try:
                chat_prompt(model, history, ToolUse(tools if model.formats().tools is not None else ()))
                num_rendered += 1
            except QuireError as error:
                refused.append(f"{name}: {error} for {json.dumps(history)[:300]}")
        model.close()
    for line in refused[:5]:
        say(f"    {line}")
    proof.equals("histories_rendered", num_rendered, 20 * len(made))
    proof.equals("histories_refused", len(refused), 0)


TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}]
ARGUMENTS = ('{"path": "a', '{"command":"str_replace","path":"/w/a.py","new_str":"x = \\"1', "{", "", None, "[1]", "{}")


def broken_history(random: Random) -> list[Message]:
    """Some turns; each has calls and results, of which some are cut, missing, doubled or of another call."""
    messages = [USER] if random.random() < 0.9 else []
    for turn in range(random.randint(1, 4)):
        ids = [f"call_{turn}{number}" for number in range(random.choice((1, 1, 2)))]
        if random.random() < 0.9:
            messages.append(calling(*(call(random.choice(ARGUMENTS), call_id) for call_id in ids)))
        answered = [one for one in ids if random.random() < 0.8] + ["call_x"] * (random.random() < 0.2)
        messages += [result("Unterminated string starting at: line 1", call_id) for call_id in answered]
        messages += [USER] * (random.random() < 0.4)
    return messages if messages else [result()]
