// What the official JavaScript SDKs make of a server: the cases of sdk_cases.py, said in the other language.
//
//     node sdk_cases.mjs < what       beside a node_modules with `openai`, `@anthropic-ai/sdk` and `zod`

import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const told = JSON.parse(readFileSync(0, "utf8"));
const { url, model } = told;
const ofOpenAI = (apiKey) => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const ofAnthropic = (apiKey) => new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const openai = ofOpenAI(told.key), anthropic = ofAnthropic(told.key);
const words = ["river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "harbour", "orange"];
const Place = z.object({ city: z.enum(["Bonn", "Rome", "Oslo"]), size: z.union([z.literal(1), z.literal(2)]) });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bonn", "Rome", "Oslo"] }, size: { enum: [1, 2] } },
  required: ["city", "size"],
  additionalProperties: false,
};
const find = { name: "find", description: "Finds." };
let calls = 0, stops = 0, refusals = 0, seed = told.seed;
const call = (promise) => { calls++; return promise; };
const dice = (most) => { seed = (seed * 48271) % 2147483647; return seed % most; };
const question = () => `Tell me of the ${words[dice(10)]} and the ${words[dice(10)]} and the ${words[dice(10)]}.`;
const turn = (text) => [{ role: "user", content: text ?? question() }];
const same = (one, other) => {
  const [a, b] = [JSON.stringify(one), JSON.stringify(other)];
  if (a !== b) throw new Error(`${a} is not ${b}`);
};
const holds = (isSo, what) => { if (!isSo) throw new Error(JSON.stringify(what)); };
const refused = async (kind, promise) => {
  try { await call(promise); }
  catch (error) {
    holds(error instanceof kind && [kind.name, "ThreadNotFoundError"].includes(error.constructor.name), String(error));
    if ([429, 503].includes(error.status)) holds(error.headers.get("retry-after"), error.message);
    refusals++;
    return error;
  }
  throw new Error(`it was answered, and ${kind.name} was wanted`);
};

// -- chats ---------------------------------------------------------------------------------------------------------

const chatSaid = ({ choices: [choice] }) => [
  choice.message.content ?? "",
  (choice.message.tool_calls ?? []).map((one) => [one.function.name, one.function.arguments]),
  choice.finish_reason,
];
const chatStreamed = async (body) => {
  let said = "";
  const stream = call(openai.chat.completions.stream(body));
  stream.on("content", (delta) => { said += delta; });
  const final = await stream.finalChatCompletion();
  same(said, final.choices[0].message.content ?? "");
  return final;
};

const chatPlain = async () => {
  const body = { model, messages: turn(), max_tokens: 24, temperature: dice(2) * 0.8, seed: dice(99) };
  const whole = await call(openai.chat.completions.create(body));
  same(chatSaid(await chatStreamed(body)), chatSaid(whole));
  let said = "", usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await call(openai.chat.completions.create({ ...body, ...options }))) {
    said += chunk.choices.map((one) => one.delta.content ?? "").join("");
    usage = chunk.usage ?? usage;
  }
  same([said, usage.completion_tokens], [whole.choices[0].message.content, whole.usage.completion_tokens]);
};

const chatTools = async () => {
  const tools = [{ type: "function", function: { ...find, parameters: schema } }];
  const choice = dice(2) ? "required" : { type: "function", function: { name: "find" } };
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60, tools, tool_choice: choice };
  body.parallel_tool_calls = false;
  const whole = await call(openai.chat.completions.create(body));
  same(chatSaid(await chatStreamed(body)), chatSaid(whole));
  const [{ message, finish_reason }] = whole.choices;
  same([finish_reason, message.tool_calls.length], ["tool_calls", 1]);
  Place.parse(JSON.parse(message.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "found" };
  const messages = [...body.messages, message, result];
  const after = await call(openai.chat.completions.create({ ...body, messages, tool_choice: "auto" }));
  holds(after.usage.prompt_tokens > whole.usage.prompt_tokens, after.usage);
};

const chatParse = async () => {
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60 };
  const shaped = { ...body, response_format: zodResponseFormat(Place, "place") };
  const { parsed } = (await call(openai.chat.completions.parse(shaped))).choices[0].message;
  Place.parse(parsed);
  same((await chatStreamed(shaped)).choices[0].message.parsed, parsed);
  const tools = [zodFunction({ name: "find", parameters: Place })];
  const asked = { ...body, tools, tool_choice: "required", parallel_tool_calls: false };
  const { choices } = await call(openai.chat.completions.parse(asked));
  Place.parse(choices[0].message.tool_calls[0].function.parsed_arguments);
};

// -- responses -----------------------------------------------------------------------------------------------------

const responseSaid = (one) => [
  one.output.map((item) => [item.type, item.name, item.arguments]), one.output_text, one.status,
  one.usage.output_tokens,
];
const textOf = (response) => response.output.filter((item) => item.type === "message")
  .flatMap((item) => item.content.map((part) => part.text)).join("");
const responseStreamed = async (body) => {
  let said = "", last = null;
  const stream = call(openai.responses.stream(body));
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") said += event.delta;
    last = event;
  }
  holds(["response.completed", "response.incomplete"].includes(last.type), last);
  same(said, textOf(last.response));
  return { ...last.response, output_text: textOf(last.response) };
};

const responsePlain = async () => {
  const body = { model, temperature: 0, input: question(), max_output_tokens: 24, instructions: "Be brief." };
  const whole = await call(openai.responses.create(body));
  same(responseSaid(await responseStreamed(body)), responseSaid(whole));
  const more = question();
  const byId = await call(openai.responses.create({ ...body, input: more, previous_response_id: whole.id }));
  const input = [...turn(body.input), ...whole.output, ...turn(more)];
  same(responseSaid(byId), responseSaid(await call(openai.responses.create({ ...body, input, store: false }))));
  same((await call(openai.responses.retrieve(whole.id))).output, whole.output);
  await call(openai.responses.delete(whole.id));
  await refused(OpenAI.NotFoundError, openai.responses.retrieve(whole.id));
};

const responseTools = async () => {
  const tools = [{ type: "function", ...find, parameters: schema, strict: true }];
  const body = { model, temperature: 0, input: turn(), max_output_tokens: 60, tools, tool_choice: "required" };
  body.parallel_tool_calls = false;
  const whole = await call(openai.responses.create(body));
  same(responseSaid(await responseStreamed(body)), responseSaid(whole));
  const [called] = whole.output.filter((item) => item.type === "function_call");
  Place.parse(JSON.parse(called.arguments));
  const result = { type: "function_call_output", call_id: called.call_id, output: "found" };
  const input = [...body.input, ...whole.output, result];
  const after = await call(openai.responses.create({ ...body, input, tool_choice: "auto" }));
  holds(after.usage.input_tokens > whole.usage.input_tokens, after.usage);
};

const responseParse = async () => {
  const text = { format: zodTextFormat(Place, "place") };
  const body = { model, temperature: 0, input: question(), max_output_tokens: 60, text };
  const parsed = (await call(openai.responses.parse(body))).output_parsed;
  Place.parse(parsed);
  same((await call(openai.responses.stream(body)).finalResponse()).output_parsed, parsed);
};

// -- messages ------------------------------------------------------------------------------------------------------

const messageSaid = (one) => [
  one.content.map((block) => [block.type, block.text, block.input]), one.stop_reason, one.usage.output_tokens,
];
const messageStreamed = async (body) => {
  let said = "";
  const stream = call(anthropic.messages.stream(body));
  stream.on("text", (delta) => { said += delta; });
  const final = await stream.finalMessage();
  same(said, final.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
  return final;
};

const messagePlain = async () => {
  const asked = { model, messages: turn(), system: "Be brief." };
  const body = { ...asked, max_tokens: 24, temperature: 0 };
  const whole = await call(anthropic.messages.create(body));
  same(messageSaid(await messageStreamed(body)), messageSaid(whole));
  const { input_tokens: counted } = await call(anthropic.messages.countTokens(asked));
  same(counted, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
};

const messageTools = async () => {
  const tools = [{ ...find, input_schema: schema }];
  const choice = dice(2) ? { type: "any" } : { type: "tool", name: "find" };
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60, tools };
  body.tool_choice = { ...choice, disable_parallel_tool_use: true };
  const whole = await call(anthropic.messages.create(body));
  same(messageSaid(await messageStreamed(body)), messageSaid(whole));
  const [used] = whole.content.filter((block) => block.type === "tool_use");
  Place.parse(used.input);
  same(whole.stop_reason, "tool_use");
  const result = { type: "tool_result", tool_use_id: used.id, content: "found" };
  const answered = [{ role: "assistant", content: whole.content }, { role: "user", content: [result] }];
  const messages = [...body.messages, ...answered];
  const after = await call(anthropic.messages.create({ ...body, messages, tool_choice: { type: "auto" } }));
  holds(after.usage.output_tokens > 0, after);
};

const messageParse = async () => {
  const body = { model, messages: turn(), max_tokens: 60, output_config: { format: zodOutputFormat(Place) } };
  Place.parse((await call(anthropic.messages.parse(body))).parsed_output);
  Place.parse((await messageStreamed(body)).parsed_output);
};

const messageThread = async () => {
  const [[first], [second]] = [turn(), turn()];
  const always = { model, max_tokens: 20, temperature: 0, system: "Be brief." };
  const thread = anthropic.beta.messages.thread(always);
  const one = await call(thread.send(first)), two = await call(thread.send(second));
  const messages = [first, { role: "assistant", content: one.content }, second];
  same(messageSaid(two), messageSaid(await call(anthropic.messages.create({ ...always, messages }))));
  const ran = [];
  const run = ({ city }) => { ran.push(city); return "found"; };
  const tools = [betaZodTool({ ...find, inputSchema: Place, run })];
  const choice = { type: "any", disable_parallel_tool_use: true };
  const runner = anthropic.beta.messages.toolRunner(
    { model, max_tokens: 60, temperature: 0, messages: turn(), tools, tool_choice: choice, max_iterations: 2 });
  let turns = 0;
  for await (const message of runner) turns += call(Number(message.content.length > 0));
  same([turns, ran.length > 0], [2, true]);
};

// -- refusals ------------------------------------------------------------------------------------------------------

const openaiRefusals = async () => {
  const body = { model, messages: turn(), max_tokens: 2 }, chat = openai.chat.completions;
  same((await refused(OpenAI.NotFoundError, chat.create({ ...body, model: "nobody" }))).code, "model_not_found");
  const wrong = await refused(OpenAI.BadRequestError, chat.create({ ...body, temperature: -1 }));
  same([wrong.code, wrong.param], ["invalid_parameter", "temperature"]);
  const long = await refused(OpenAI.BadRequestError, openai.responses.create({ model, input: "x ".repeat(1900) }));
  same(long.code, "context_length_exceeded");
  const lost = { model, input: "x", previous_response_id: "resp_none" };
  const unknown = await refused(OpenAI.BadRequestError, openai.responses.create(lost));
  same(unknown.code, "previous_response_not_found");
  await refused(OpenAI.AuthenticationError, ofOpenAI("wrong").responses.create({ model, input: "x" }));
};

const anthropicRefusals = async () => {
  const body = { model, messages: turn(), max_tokens: 2 }, { messages } = anthropic;
  const type = async (kind, promise) => (await refused(kind, promise)).error.error.type;
  same(await type(Anthropic.NotFoundError, messages.create({ ...body, model: "nobody" })), "not_found_error");
  same(await type(Anthropic.BadRequestError, messages.create({ ...body, temperature: -1 })), "invalid_request_error");
  const longer = { ...body, messages: turn("x ".repeat(1900)) };
  const long = await refused(Anthropic.BadRequestError, messages.create(longer));
  holds(/^prompt is too long: \d+ tokens > \d+ maximum$/.test(long.error.error.message), long.error);
  const thread = { type: "continue", previous_message_id: "msg_none" };
  const lost = await refused(Anthropic.NotFoundError, messages.create({ ...body, thread }));
  same(lost.error.error.details, { error_code: "thread_not_found" });
  const stranger = ofAnthropic("wrong").messages;
  same(await type(Anthropic.AuthenticationError, stranger.create(body)), "authentication_error");
  await refused(Anthropic.AuthenticationError, stranger.countTokens({ model, messages: turn() }));
};

const rateLimits = async () => {
  const [first, second] = told.limited.splice(0);
  if (!first) return;
  const body = { model, messages: turn(), max_tokens: 1 };
  const chat = ofOpenAI(first).chat.completions, { messages } = ofAnthropic(second);
  await call(chat.create(body));
  await refused(OpenAI.RateLimitError, chat.create(body));
  await call(messages.create(body));
  await refused(Anthropic.RateLimitError, messages.countTokens({ model, messages: turn() }));
};

const models = async () => {
  for (const client of [openai, anthropic]) {
    same((await call(client.models.list())).data.map((one) => one.id), [model]);
    same((await call(client.models.retrieve(model))).id, model);
  }
};

// -- several answers, cut by a stop ----------------------------------------------------------------------------------

const chatChoices = async (body) => {
  const whole = await call(openai.chat.completions.create({ ...body, logprobs: true, top_logprobs: 2 }));
  const rows = whole.choices.flatMap((one) => one.logprobs.content);
  holds(rows.every((row) => row.top_logprobs.length === 2), rows.slice(0, 2));
  same(rows.length, whole.usage.completion_tokens);
  return whole.choices.map((one) => [one.message.content, one.finish_reason]);
};
const chatChunks = async (body) => {
  const texts = Array.from({ length: body.n }, () => ["", ""]);
  const more = { logprobs: true, top_logprobs: 2, stream: true, stream_options: { include_usage: true } };
  let usage = null, rows = 0;
  for await (const chunk of await call(openai.chat.completions.create({ ...body, ...more }))) {
    for (const one of chunk.choices) {
      texts[one.index][0] += one.delta.content ?? "";
      texts[one.index][1] = one.finish_reason ?? texts[one.index][1];
      rows += one.logprobs?.content?.length ?? 0;
    }
    usage = chunk.usage ?? usage;
  }
  same(rows, usage.completion_tokens);
  return texts;
};
const completionChoices = async (body) => {
  const whole = await call(openai.completions.create({ ...body, logprobs: 1 }));
  same(whole.choices.reduce((sum, one) => sum + one.logprobs.token_logprobs.length, 0), whole.usage.completion_tokens);
  return whole.choices.map((one) => [one.text, one.finish_reason]);
};
const completionChunks = async (body) => {
  const texts = Array.from({ length: body.n }, () => ["", ""]);
  for await (const chunk of await call(openai.completions.create({ ...body, logprobs: 1, stream: true })))
    for (const one of chunk.choices) {
      texts[one.index][0] += one.text;
      texts[one.index][1] = one.finish_reason ?? texts[one.index][1];
    }
  return texts;
};
const cutByAStop = async (whole, streamed, own) => {
  const body = { model, max_tokens: 8 + dice(33), seed: dice(999), n: 1 + dice(3), ...own };
  const first = await whole(body);
  same([await whole(body), await streamed(body), first.length], [first, first, body.n]);
  const found = first[0][0].slice(1).match(/[ -~]{2}/);
  if (!found) return;
  stops++;
  const stop = found[0], stopped = { ...body, stop: dice(2) ? stop : [stop, "\u0001\u0002"] };
  const cut = await whole(stopped);
  same(await streamed(stopped), cut);
  first.forEach(([text], at) => {
    holds(!cut[at][0].includes(stop), [stopped, cut[at]]);
    if (text.includes(stop)) same(cut[at], [text.slice(0, text.indexOf(stop)), "stop"]);
  });
};
const chatStops = () => cutByAStop(chatChoices, chatChunks, { messages: turn() });
const completionStops = () => cutByAStop(completionChoices, completionChunks, { prompt: question() });

const completionMistakes = async () => {
  const [mistake, kind, code] = [
    [{ model: "nobody" }, OpenAI.NotFoundError, "model_not_found"],
    [{ n: 9 }, OpenAI.BadRequestError, "invalid_parameter"],
    [{ prompt: "x ".repeat(1900) }, OpenAI.BadRequestError, "context_length_exceeded"],
  ][dice(3)];
  same((await refused(kind, openai.completions.create({ model, prompt: "x", ...mistake }))).code, code);
};

const overloaded = async () => {
  const body = { model, prompt: "x", max_tokens: 1 }, leaving = new AbortController();
  const once = ofOpenAI(told.limited[0]).completions, { completions } = openai;
  const hold = { model, prompt: "hold", max_tokens: 400, stream: true };
  const held = await completions.create(hold, { signal: leaving.signal });
  await held[Symbol.asyncIterator]().next();
  same((await refused(OpenAI.InternalServerError, completions.create(body))).code, "server_overloaded");
  leaving.abort();
  const stranger = ofOpenAI("wrong").completions;
  same((await refused(OpenAI.AuthenticationError, stranger.create(body))).code, "invalid_api_key");
  for (const until = Date.now() + 60_000; Date.now() < until;)
    try { await completions.create(body); break; }
    catch (error) { await new Promise((done) => setTimeout(done, 20)); }
  await call(once.create(body));
  same((await refused(OpenAI.RateLimitError, once.create(body))).code, "rate_limit_exceeded");
};

const kinds = Object.entries({
  agents: {
    chatPlain, chatTools, chatParse, responsePlain, responseTools, responseParse, messagePlain, messageTools,
    messageParse, messageThread, openaiRefusals, anthropicRefusals, rateLimits, models,
  },
  completions: { completionMistakes, chatStops, completionStops },
  refusals: { overloaded },
}[told.kinds]);
const tried = {}, wrong = [];
for (let at = 0; calls < told.count || at < told.num_cases; at++) {
  const [name, run] = kinds[at % kinds.length];
  tried[name] = (tried[name] ?? 0) + 1;
  try { await run(); }
  catch (error) { wrong.push(`javascript, ${name}: ${error.stack ?? error}`.slice(0, 600)); }
}
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const versions = { openai: version("openai"), anthropic: version("@anthropic-ai/sdk") };
const counts = { num_calls: calls, num_stops: stops, num_refused: refusals };
console.log(JSON.stringify({ ...counts, kinds: tried, versions, wrong }));
process.exit(0);
