"""What the official SDKs make of our answers: the Python one and the JavaScript one, the same cases for both.

A stop string is taken from the middle of an answer that was given without one, so that it is known to come: then the
answer must end before it. Refusals that depend on who asks and when (401, 429, 503) are asked for at a server that has
one key too many and one place too few.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import openai

from benchmarks.record import say
from proofs.api.load import Server, phrase, serve_words, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key


@section("sdk")
def sdk(proof: Proof) -> None:
    """Half of the cases in each language; at full scale a tenth of them with the real model."""
    folder, dice = proof.folder, proof.random
    count = proof.sized(quick=60, full=1000)
    num_real = count // 10 if proof.is_full else 0
    results = [_at_server(folder, ("oracle", count - num_real), dice)]
    if num_real:
        results.append(_at_server(folder, ("m", num_real), dice, *serve_words(), module="quire serve"))
    results.append(_refusals(folder))
    wrong = [told for one in results for told in one.wrong]
    for told in wrong[:8]:
        say(f"  {told}")
    num_cases = sum(one.num_python + one.num_js for one in results)
    num_js = sum(one.num_js for one in results)
    num_stops = min((one.num_stops for one in results[:-1]), default=0)
    proof.at_least("sdk_cases", num_cases, count)
    proof.at_least("sdk_js_cases", num_js, 0.4 * count)
    proof.at_least("sdk_real_cases", num_real, proof.sized(quick=0, full=100))
    proof.at_least("sdk_stop_cases", num_stops, 1, "at each server")
    num_refusals = results[-1].num_python + results[-1].num_js
    proof.equals("sdk_refusals", num_refusals, 6, "401, 429, 503 in each")
    proof.equals("sdk_wrong", len(wrong), 0)


@dataclass
class Cases:
    """What was tried, and what was wrong."""

    num_python: int = 0
    num_js: int = 0
    num_stops: int = 0
    """Cases whose stop string is known to be in the answer."""
    wrong: list[str] = field(default_factory=list)


def _at_server(folder: Path, case: tuple[str, int], dice: Random, *words: str, **how: Any) -> Cases:
    model, count = case
    with started(folder, *words, **how) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        cases = Cases()
        for at in range(count - count // 2):
            cases.num_python += 1
            told = _Case(client, model, dice, phrase(dice), at).wrong(cases)
            cases.wrong += [f"{model}, case {at}: {told}"] if told else []
        told_js = run_js(folder, "cases", [f"{server.url}/v1", model, str(dice.randint(0, 10**6)), str(count // 2)])
    cases.num_js += told_js.num_js
    cases.num_stops = min(cases.num_stops, told_js.num_stops)
    cases.wrong += told_js.wrong
    return cases


@dataclass
class _Case:
    """One question asked in several ways, or one mistake."""

    client: openai.OpenAI
    model: str
    dice: Random
    phrase: str
    at: int

    def wrong(self, cases: Cases) -> str | None:
        try:
            return self._wrong(cases)
        except (AssertionError, openai.OpenAIError) as error:
            return f"{error!r}"

    def _wrong(self, cases: Cases) -> str | None:
        match self.at % 5:
            case 0:
                return self._mistake()
            case 1 | 2:
                return self._asked(self._chat, self._chat_stream, cases)
        return self._asked(self._complete, self._complete_stream, cases)

    def _asked(self, ask: Callable[..., Any], stream: Callable[..., Any], cases: Cases) -> str | None:
        """Whole, again, streamed; and once more with a stop that is known to come."""
        asked = {"model": self.model, "max_tokens": self.dice.randint(8, 40), "seed": self.at}
        asked |= {"n": self.dice.choice([1, 1, 2, 3])}
        first, again, streamed = ask(asked), ask(asked), stream(asked)
        if not first == again == streamed or len(first) != asked["n"]:
            return f"{asked}: {first} again {again} streamed {streamed}"
        stop = _stop_in(self.dice, first[0][0])
        if stop is None:
            return None
        cases.num_stops += 1
        with_stop = asked | {"stop": self.dice.choice([stop, [stop], ["\x01\x02", stop]])}
        cut, cut_streamed = ask(with_stop), stream(with_stop)
        if cut != cut_streamed:
            return f"{with_stop}: {cut} streamed {cut_streamed}"
        for (text, _), (short, reason) in zip(first, cut, strict=True):
            ends = (text.partition(stop)[0], "stop") if stop in text else (short, reason)
            if (short, reason) != ends or stop in short:
                return f"{with_stop}: {text!r} was cut to {short!r} with {reason}"
        return None

    def _messages(self) -> Any:
        return [{"role": "user", "content": self.phrase}]

    def _chat(self, asked: dict[str, Any]) -> list[tuple[str, str]]:
        whole = self.client.chat.completions.create(**asked, messages=self._messages(), logprobs=True, top_logprobs=2)
        num_logprobs = 0
        for choice in whole.choices:
            rows = (choice.logprobs and choice.logprobs.content) or []
            num_logprobs += len(rows)
            assert all(row.logprob <= 0 and len(row.top_logprobs) == 2 for row in rows), rows[:2]
        assert whole.usage is not None
        assert num_logprobs == whole.usage.completion_tokens, (num_logprobs, whole.usage)
        return [(one.message.content or "", str(one.finish_reason)) for one in whole.choices]

    def _chat_stream(self, asked: dict[str, Any]) -> list[tuple[str, str]]:
        texts, reasons, num_logprobs, usage = [""] * asked["n"], [""] * asked["n"], 0, None
        told = {**asked, "messages": self._messages(), "logprobs": True, "top_logprobs": 2}
        told |= {"stream_options": {"include_usage": True}}
        for chunk in self.client.chat.completions.create(**told, stream=True):
            for one in chunk.choices:
                texts[one.index] += one.delta.content or ""
                reasons[one.index] = one.finish_reason or reasons[one.index]
                num_logprobs += len((one.logprobs and one.logprobs.content) or ())
            usage = chunk.usage
        assert usage is not None
        assert usage.completion_tokens == num_logprobs, (num_logprobs, usage)
        return list(zip(texts, reasons, strict=True))

    def _complete(self, asked: dict[str, Any]) -> list[tuple[str, str]]:
        whole = self.client.completions.create(**asked, prompt=self.phrase, logprobs=1)
        assert whole.usage is not None
        rows = [len((one.logprobs and one.logprobs.token_logprobs) or ()) for one in whole.choices]
        assert sum(rows) == whole.usage.completion_tokens, (rows, whole.usage)
        return [(one.text, one.finish_reason) for one in whole.choices]

    def _complete_stream(self, asked: dict[str, Any]) -> list[tuple[str, str]]:
        texts, reasons = [""] * asked["n"], [""] * asked["n"]
        for piece in self.client.completions.create(**asked, prompt=self.phrase, logprobs=1, stream=True):
            for one in piece.choices:
                texts[one.index] += one.text
                reasons[one.index] = one.finish_reason or reasons[one.index]
        return list(zip(texts, reasons, strict=True))

    def _mistake(self) -> str | None:
        asked, kind, code = self.dice.choice(_mistakes(self.model))
        return _refused(lambda: self.client.completions.create(**asked), kind, code)


def _mistakes(model: str) -> list[tuple[dict[str, Any], type[openai.APIStatusError], str]]:
    return [
        ({"model": "nobody", "prompt": "x"}, openai.NotFoundError, "model_not_found"),
        ({"model": model, "prompt": "x", "n": 9}, openai.BadRequestError, "invalid_parameter"),
        ({"model": model, "prompt": "x " * 1900}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": model, "prompt": "x", "temperature": -1}, openai.BadRequestError, "invalid_parameter"),
    ]


def _refused(call: Callable[[], Any], kind: type[openai.APIStatusError], code: str) -> str | None:
    try:
        call()
    except openai.APIStatusError as error:
        has_retry = "retry-after" in error.response.headers or error.status_code not in (429, 503)
        is_so = type(error) is kind and error.code == code and has_retry
        return None if is_so else f"wanted {kind.__name__} {code}: {error!r}"
    return f"wanted {kind.__name__} {code}: it was answered"


def _stop_in(dice: Random, text: str) -> str | None:
    """A few plain characters from the middle of it, as it stands there."""
    places = [at for at in range(1, len(text) - 2) if text[at : at + 2].isascii() and text[at : at + 2].isprintable()]
    if not places:
        return None
    at = dice.choice(places)
    return text[at : at + 2]


# -- who may not, or not now -------------------------------------------------------------------------------------------


def _refusals(folder: Path) -> Cases:
    """At a server with one place, held by somebody: both SDKs get 503, 429 and 401 as errors of their own kinds.

    Each has a server of its own: where another tenant has asked within the last minute, a tenant that holds the one
    place is told that it has its share, not that the server is full.
    """
    keys = folder / "sdk-keys.json"
    good, once = add_key(keys, "good"), add_key(keys, "once", requests_per_minute=1)
    words = ("--keys-file", str(keys), "--max-open-requests", "1", "--step-s", "0.02")
    cases = Cases()
    with started(folder, *words) as server:
        told = _python_refusals(server, good, once)
    with started(folder, *words) as server:
        told_js = run_js(folder, "refusals", [f"{server.url}/v1", "oracle", good, once])
    cases.num_python, cases.num_js = len(told), told_js.num_js
    cases.wrong = [one for one in told if one] + told_js.wrong
    return cases


def _python_refusals(server: Server, good: str, once: str) -> list[str | None]:
    """What was wrong with each."""

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    def ask(key: str) -> Callable[[], Any]:
        return lambda: client(key).completions.create(model="oracle", prompt="x", max_tokens=1)

    with client(good).completions.create(model="oracle", prompt="hold", max_tokens=400, stream=True) as held:
        next(iter(held))
        told = [_refused(ask(good), openai.InternalServerError, "server_overloaded")]
    _until_empty(server)
    told.append(_refused(ask("wrong"), openai.AuthenticationError, "invalid_api_key"))
    ask(once)()
    told.append(_refused(ask(once), openai.RateLimitError, "rate_limit_exceeded"))
    return told


def _until_empty(server: Server) -> None:
    while server.admin("/stats")["num_open_requests"]:
        time.sleep(0.02)


# -- JavaScript --------------------------------------------------------------------------------------------------------

JS = """\
import OpenAI from "openai";
const [what, url, model, ...rest] = process.argv.slice(2);
const of = (apiKey) => new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
const wrong = [];
let cases = 0, stops = 0;
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const refused = async (call, kind, status, code) => {
  cases++;
  try { await call(); wrong.push(`wanted ${status} ${code}: it was answered`); }
  catch (error) {
    const ok = error instanceof kind && error.status === status && error.code === code
      && (![429, 503].includes(status) || error.headers.get("retry-after"));
    if (!ok) wrong.push(`wanted ${status} ${code}: ${error}`);
  }
};
const chat = async (client, asked, stream) => {
  const told = { ...asked, messages: [{ role: "user", content: asked.prompt }], logprobs: true, top_logprobs: 2 };
  delete told.prompt;
  if (!stream) {
    const whole = await client.chat.completions.create(told);
    const rows = whole.choices.flatMap((one) => one.logprobs.content);
    if (rows.length !== whole.usage.completion_tokens || rows.some((row) => row.top_logprobs.length !== 2))
      wrong.push(`logprobs of ${JSON.stringify(asked)}`);
    return whole.choices.map((one) => [one.message.content, one.finish_reason]);
  }
  const texts = Array.from({ length: asked.n }, () => ["", ""]);
  let usage = null, rows = 0;
  for await (const chunk of await client.chat.completions.create(
    { ...told, stream: true, stream_options: { include_usage: true } })) {
    for (const one of chunk.choices) {
      texts[one.index][0] += one.delta.content ?? "";
      texts[one.index][1] = one.finish_reason ?? texts[one.index][1];
      rows += one.logprobs?.content?.length ?? 0;
    }
    usage = chunk.usage ?? usage;
  }
  if (rows !== usage?.completion_tokens) wrong.push(`streamed logprobs of ${JSON.stringify(asked)}`);
  return texts;
};
const complete = async (client, asked, stream) => {
  if (!stream) {
    const whole = await client.completions.create({ ...asked, logprobs: 1 });
    const rows = whole.choices.reduce((sum, one) => sum + one.logprobs.token_logprobs.length, 0);
    if (rows !== whole.usage.completion_tokens) wrong.push(`logprobs of ${JSON.stringify(asked)}`);
    return whole.choices.map((one) => [one.text, one.finish_reason]);
  }
  const texts = Array.from({ length: asked.n }, () => ["", ""]);
  for await (const chunk of await client.completions.create({ ...asked, logprobs: 1, stream: true }))
    for (const one of chunk.choices) {
      texts[one.index][0] += one.text;
      texts[one.index][1] = one.finish_reason ?? texts[one.index][1];
    }
  return texts;
};
const question = async (client, seed) => {
  cases++;
  const ask = seed % 2 ? chat : complete;
  const asked = { model, seed, n: 1 + (seed % 3), max_tokens: 8 + (seed % 33), prompt: `question ${seed}` };
  const first = await ask(client, asked, false), again = await ask(client, asked, false);
  const streamed = await ask(client, asked, true);
  if (!same(first, again) || !same(first, streamed) || first.length !== asked.n)
    wrong.push(`${JSON.stringify(asked)}: ${JSON.stringify([first, again, streamed])}`);
  const found = first[0][0].slice(1).match(/[ -~]{2}/);
  if (!found) return;
  stops++;
  const stop = found[0], stopped = { ...asked, stop: seed % 4 < 2 ? stop : [stop, "\\u0001\\u0002"] };
  const cut = await ask(client, stopped, false);
  if (!same(cut, await ask(client, stopped, true))) wrong.push(`streamed with a stop: ${JSON.stringify(stopped)}`);
  first.forEach(([text], at) => {
    const wanted = text.includes(stop) ? [text.slice(0, text.indexOf(stop)), "stop"] : cut[at];
    if (!same(cut[at], wanted) || cut[at][0].includes(stop))
      wrong.push(`${JSON.stringify(stopped)}: ${JSON.stringify([text, cut[at]])}`);
  });
};
if (what === "cases") {
  const client = of("none");
  for (let seed = Number(rest[0]); seed < Number(rest[0]) + Number(rest[1]); seed++)
    if (seed % 5) await question(client, seed);
    else {
      const mistakes = [
        [{ model: "nobody", prompt: "x" }, OpenAI.NotFoundError, 404, "model_not_found"],
        [{ model, prompt: "x", n: 9 }, OpenAI.BadRequestError, 400, "invalid_parameter"],
        [{ model, prompt: "x ".repeat(1900) }, OpenAI.BadRequestError, 400, "context_length_exceeded"],
      ];
      const [asked, kind, status, code] = mistakes[(seed / 5) % 3];
      await refused(() => client.completions.create(asked), kind, status, code);
    }
} else {
  const [good, once] = rest, asked = { model, prompt: "x", max_tokens: 1 };
  const leaving = new AbortController();
  const held = await of(good).completions.create(
    { model, prompt: "hold", max_tokens: 400, stream: true }, { signal: leaving.signal });
  await held[Symbol.asyncIterator]().next();
  await refused(() => of(good).completions.create(asked), OpenAI.InternalServerError, 503, "server_overloaded");
  leaving.abort();
  await new Promise((done) => setTimeout(done, 1200));
  await refused(() => of("wrong").completions.create(asked), OpenAI.AuthenticationError, 401, "invalid_api_key");
  await of(once).completions.create(asked);
  await refused(() => of(once).completions.create(asked), OpenAI.RateLimitError, 429, "rate_limit_exceeded");
}
console.log(JSON.stringify({ cases, stops, wrong }));
process.exit(0);
"""


def run_js(folder: Path, what: str, words: list[str]) -> Cases:
    """Cases of the JavaScript SDK, which is fetched by its name. Where it cannot be had, that is what is wrong."""
    script = folder / "js" / "cases.mjs"
    if not script.exists() and (missing := _fetch_js(folder)):
        return Cases(wrong=[f"javascript: {missing}"])
    script.write_text(JS)
    command = ["node", str(script), what, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        return Cases(wrong=[f"javascript: {done.stderr[-300:]}"])
    told = json.loads(done.stdout)
    return Cases(num_js=told["cases"], num_stops=told["stops"], wrong=[f"javascript: {one}" for one in told["wrong"]])


def _fetch_js(folder: Path) -> str:
    """Why it cannot be had, if it cannot."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are needed, and at least one is missing"
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder / "js"), "openai"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return "" if done.returncode == 0 else f"the SDK cannot be fetched: {done.stderr[-200:]}"
