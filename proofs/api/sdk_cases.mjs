// Cases with the official JavaScript SDKs: the cases of sdk_cases.py, with the same input and output.
//
//     node sdk_cases.mjs < job        beside a node_modules with `openai`, `@anthropic-ai/sdk` and `zod`

import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const job = JSON.parse(readFileSync(0, "utf8"));
const { url, model } = job;
const openaiClient = (apiKey) => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropicClient = (apiKey) => new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const openai = openaiClient(job.key), anthropic = anthropicClient(job.key);
const words = ["river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "harbour", "orange"];
const Place = z.object({ city: z.enum(["Bonn", "Rome", "Oslo"]), size: z.union([z.literal(1), z.literal(2)]) });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bonn", "Rome", "Oslo"] }, size: { enum: [1, 2] } },
  required: ["city", "size"],
  additionalProperties: false,
};
const find = { name: "find", description: "Finds." };
let calls = 0, stops = 0, refusals = 0, seed = job.seed;
const call = (promise) => { calls++; return promise; };
const roll = (limit) => { seed = (seed * 48271) % 2147483647; return seed % limit; };
const question = () => `Tell me of the ${words[roll(10)]} and the ${words[roll(10)]} and the ${words[roll(10)]}.`;
const turn = (text) => [{ role: "user", content: text ?? question() }];
const checkEq = (actual, expected) => {
  const [a, b] = [JSON.stringify(actual), JSON.stringify(expected)];
  if (a !== b) throw new Error(`expected ${b}, got ${a}`);
};
const check = (condition, details) => { if (!condition) throw new Error(JSON.stringify(details)); };
const refusal = async (kind, promise) => {
  try { await call(promise); }
  catch (error) {
    check(error instanceof kind && [kind.name, "ThreadNotFoundError"].includes(error.constructor.name), String(error));
    if ([429, 503].includes(error.status)) check(error.headers.get("retry-after"), error.message);
    refusals++;
    return error;
  }
  throw new Error(`expected ${kind.name}, got an answer`);
};

// -- chats ---------------------------------------------------------------------------------------------------------

const chatParts = ({ choices: [choice] }) => [
  choice.message.content ?? "",
  (choice.message.tool_calls ?? []).map((one) => [one.function.name, one.function.arguments]),
  choice.finish_reason,
];
const chatStreamed = async (body) => {
  let text = "";
  const stream = call(openai.chat.completions.stream(body));
  stream.on("content", (delta) => { text += delta; });
  const final = await stream.finalChatCompletion();
  checkEq(text, final.choices[0].message.content ?? "");
  return final;
};

const chatPlain = async () => {
  const body = { model, messages: turn(), max_tokens: 24, temperature: roll(2) * 0.8, seed: roll(99) };
  const whole = await call(openai.chat.completions.create(body));
  checkEq(chatParts(await chatStreamed(body)), chatParts(whole));
  let text = "", usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await call(openai.chat.completions.create({ ...body, ...options }))) {
    text += chunk.choices.map((one) => one.delta.content ?? "").join("");
    usage = chunk.usage ?? usage;
  }
  checkEq([text, usage.completion_tokens], [whole.choices[0].message.content, whole.usage.completion_tokens]);
};

const chatTools = async () => {
  const tools = [{ type: "function", function: { ...find, parameters: schema } }];
  const choice = roll(2) ? "required" : { type: "function", function: { name: "find" } };
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60, tools, tool_choice: choice };
  body.parallel_tool_calls = false;
  const whole = await call(openai.chat.completions.create(body));
  checkEq(chatParts(await chatStreamed(body)), chatParts(whole));
  const [{ message, finish_reason }] = whole.choices;
  checkEq([finish_reason, message.tool_calls.length], ["tool_calls", 1]);
  Place.parse(JSON.parse(message.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "found" };
  const messages = [...body.messages, message, result];
  const after = await call(openai.chat.completions.create({ ...body, messages, tool_choice: "auto" }));
  check(after.usage.prompt_tokens > whole.usage.prompt_tokens, after.usage);
};

const chatParse = async () => {
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60 };
  const formatBody = { ...body, response_format: zodResponseFormat(Place, "place") };
  const { parsed } = (await call(openai.chat.completions.parse(formatBody))).choices[0].message;
  Place.parse(parsed);
  checkEq((await chatStreamed(formatBody)).choices[0].message.parsed, parsed);
  const tools = [zodFunction({ name: "find", parameters: Place })];
  const toolBody = { ...body, tools, tool_choice: "required", parallel_tool_calls: false };
  const { choices } = await call(openai.chat.completions.parse(toolBody));
  Place.parse(choices[0].message.tool_calls[0].function.parsed_arguments);
};

// -- responses -----------------------------------------------------------------------------------------------------

const responseParts = (response) => [
  response.output.map((item) => [item.type, item.name, item.arguments]), response.output_text, response.status,
  response.usage.output_tokens,
];
const textOf = (response) => response.output.filter((item) => item.type === "message")
  .flatMap((item) => item.content.map((part) => part.text)).join("");
const responseStreamed = async (body) => {
  let text = "", last = null;
  const stream = call(openai.responses.stream(body));
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  check(["response.completed", "response.incomplete"].includes(last.type), last);
  checkEq(text, textOf(last.response));
  return { ...last.response, output_text: textOf(last.response) };
};

const responsePlain = async () => {
  const body = { model, temperature: 0, input: question(), max_output_tokens: 24, instructions: "Be brief." };
  const whole = await call(openai.responses.create(body));
  checkEq(responseParts(await responseStreamed(body)), responseParts(whole));
  const nextQuestion = question();
  const byId = await call(openai.responses.create({ ...body, input: nextQuestion, previous_response_id: whole.id }));
  const input = [...turn(body.input), ...whole.output, ...turn(nextQuestion)];
  checkEq(responseParts(byId), responseParts(await call(openai.responses.create({ ...body, input, store: false }))));
  checkEq((await call(openai.responses.retrieve(whole.id))).output, whole.output);
  await call(openai.responses.delete(whole.id));
  await refusal(OpenAI.NotFoundError, openai.responses.retrieve(whole.id));
};

const responseTools = async () => {
  const tools = [{ type: "function", ...find, parameters: schema, strict: true }];
  const body = { model, temperature: 0, input: turn(), max_output_tokens: 60, tools, tool_choice: "required" };
  body.parallel_tool_calls = false;
  const whole = await call(openai.responses.create(body));
  checkEq(responseParts(await responseStreamed(body)), responseParts(whole));
  const [functionCall] = whole.output.filter((item) => item.type === "function_call");
  Place.parse(JSON.parse(functionCall.arguments));
  const result = { type: "function_call_output", call_id: functionCall.call_id, output: "found" };
  const input = [...body.input, ...whole.output, result];
  const after = await call(openai.responses.create({ ...body, input, tool_choice: "auto" }));
  check(after.usage.input_tokens > whole.usage.input_tokens, after.usage);
};

const responseParse = async () => {
  const text = { format: zodTextFormat(Place, "place") };
  const body = { model, temperature: 0, input: question(), max_output_tokens: 60, text };
  const parsed = (await call(openai.responses.parse(body))).output_parsed;
  Place.parse(parsed);
  checkEq((await call(openai.responses.stream(body)).finalResponse()).output_parsed, parsed);
};

// -- messages ------------------------------------------------------------------------------------------------------

const messageParts = (message) => [
  message.content.map((one) => [one.type, one.text, one.input]), message.stop_reason, message.usage.output_tokens,
];
const messageStreamed = async (body) => {
  let text = "";
  const stream = call(anthropic.messages.stream(body));
  stream.on("text", (delta) => { text += delta; });
  const final = await stream.finalMessage();
  checkEq(text, final.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
  return final;
};

const messagePlain = async () => {
  const fields = { model, messages: turn(), system: "Be brief." };
  const body = { ...fields, max_tokens: 24, temperature: 0 };
  const whole = await call(anthropic.messages.create(body));
  checkEq(messageParts(await messageStreamed(body)), messageParts(whole));
  const { input_tokens: numTokens } = await call(anthropic.messages.countTokens(fields));
  const { input_tokens: computed, cache_creation_input_tokens: written, cache_read_input_tokens: cached } = whole.usage;
  checkEq(numTokens, computed + written + cached);
};

const messageTools = async () => {
  const tools = [{ ...find, input_schema: schema }];
  const choice = roll(2) ? { type: "any" } : { type: "tool", name: "find" };
  const body = { model, temperature: 0, messages: turn(), max_tokens: 60, tools };
  body.tool_choice = { ...choice, disable_parallel_tool_use: true };
  const whole = await call(anthropic.messages.create(body));
  checkEq(messageParts(await messageStreamed(body)), messageParts(whole));
  const [toolUse] = whole.content.filter((block) => block.type === "tool_use");
  Place.parse(toolUse.input);
  checkEq(whole.stop_reason, "tool_use");
  const result = { type: "tool_result", tool_use_id: toolUse.id, content: "found" };
  const newMessages = [{ role: "assistant", content: whole.content }, { role: "user", content: [result] }];
  const messages = [...body.messages, ...newMessages];
  const after = await call(anthropic.messages.create({ ...body, messages, tool_choice: { type: "auto" } }));
  check(after.usage.output_tokens > 0, after);
};

const messageParse = async () => {
  const body = { model, messages: turn(), max_tokens: 60, output_config: { format: zodOutputFormat(Place) } };
  Place.parse((await call(anthropic.messages.parse(body))).parsed_output);
  Place.parse((await messageStreamed(body)).parsed_output);
};

const messageThread = async () => {
  const [[first], [second]] = [turn(), turn()];
  const fields = { model, max_tokens: 20, temperature: 0, system: "Be brief." };
  const thread = anthropic.beta.messages.thread(fields);
  const firstAnswer = await call(thread.send(first)), secondAnswer = await call(thread.send(second));
  const messages = [first, { role: "assistant", content: firstAnswer.content }, second];
  checkEq(messageParts(secondAnswer), messageParts(await call(anthropic.messages.create({ ...fields, messages }))));
  const cities = [];
  const run = ({ city }) => { cities.push(city); return "found"; };
  const tools = [betaZodTool({ ...find, inputSchema: Place, run })];
  const choice = { type: "any", disable_parallel_tool_use: true };
  const runner = anthropic.beta.messages.toolRunner(
    { model, max_tokens: 60, temperature: 0, messages: turn(), tools, tool_choice: choice, max_iterations: 2 });
  let turns = 0;
  for await (const message of runner) turns += call(Number(message.content.length > 0));
  checkEq([turns, cities.length > 0], [2, true]);
};

// -- refusals ------------------------------------------------------------------------------------------------------

const openaiRefusals = async () => {
  const body = { model, messages: turn(), max_tokens: 2 }, chat = openai.chat.completions;
  checkEq((await refusal(OpenAI.NotFoundError, chat.create({ ...body, model: "nobody" }))).code, "model_not_found");
  const badValue = await refusal(OpenAI.BadRequestError, chat.create({ ...body, temperature: -1 }));
  checkEq([badValue.code, badValue.param], ["invalid_parameter", "temperature"]);
  const tooLong = await refusal(OpenAI.BadRequestError, openai.responses.create({ model, input: "x ".repeat(1900) }));
  checkEq(tooLong.code, "context_length_exceeded");
  const unknownId = { model, input: "x", previous_response_id: "resp_none" };
  const notFound = await refusal(OpenAI.BadRequestError, openai.responses.create(unknownId));
  checkEq(notFound.code, "previous_response_not_found");
  await refusal(OpenAI.AuthenticationError, openaiClient("wrong").responses.create({ model, input: "x" }));
};

const anthropicRefusals = async () => {
  const body = { model, messages: turn(), max_tokens: 2 }, { messages } = anthropic;
  const type = async (kind, promise) => (await refusal(kind, promise)).error.error.type;
  checkEq(await type(Anthropic.NotFoundError, messages.create({ ...body, model: "nobody" })), "not_found_error");
  checkEq(await type(Anthropic.BadRequestError, messages.create({ ...body, temperature: -1 })), "invalid_request_error");
  const longer = { ...body, messages: turn("x ".repeat(1900)) };
  const tooLong = await refusal(Anthropic.BadRequestError, messages.create(longer));
  check(/^prompt is too long: \d+ tokens > \d+ maximum$/.test(tooLong.error.error.message), tooLong.error);
  const thread = { type: "continue", previous_message_id: "msg_none" };
  const notFound = await refusal(Anthropic.NotFoundError, messages.create({ ...body, thread }));
  checkEq(notFound.error.error.details, { error_code: "thread_not_found" });
  const stranger = anthropicClient("wrong").messages;
  checkEq(await type(Anthropic.AuthenticationError, stranger.create(body)), "authentication_error");
  await refusal(Anthropic.AuthenticationError, stranger.countTokens({ model, messages: turn() }));
};

const rateLimits = async () => {
  const [first, second] = job.limited.splice(0);
  if (!first) return;
  const body = { model, messages: turn(), max_tokens: 1 };
  const chat = openaiClient(first).chat.completions, { messages } = anthropicClient(second);
  await call(chat.create(body));
  await refusal(OpenAI.RateLimitError, chat.create(body));
  await call(messages.create(body));
  await refusal(Anthropic.RateLimitError, messages.countTokens({ model, messages: turn() }));
};

const models = async () => {
  for (const client of [openai, anthropic]) {
    checkEq((await call(client.models.list())).data.map((one) => one.id), [model]);
    checkEq((await call(client.models.retrieve(model))).id, model);
  }
};

// -- several answers, cut by a stop ----------------------------------------------------------------------------------

const chatChoices = async (body) => {
  const whole = await call(openai.chat.completions.create({ ...body, logprobs: true, top_logprobs: 2 }));
  const rows = whole.choices.flatMap((choice) => choice.logprobs.content);
  check(rows.every((row) => row.top_logprobs.length === 2), rows.slice(0, 2));
  checkEq(rows.length, whole.usage.completion_tokens);
  return whole.choices.map((choice) => [choice.message.content, choice.finish_reason]);
};
const chatChunks = async (body) => {
  const texts = Array.from({ length: body.n }, () => ["", ""]);
  const more = { logprobs: true, top_logprobs: 2, stream: true, stream_options: { include_usage: true } };
  let usage = null, rows = 0;
  for await (const chunk of await call(openai.chat.completions.create({ ...body, ...more }))) {
    for (const choice of chunk.choices) {
      texts[choice.index][0] += choice.delta.content ?? "";
      texts[choice.index][1] = choice.finish_reason ?? texts[choice.index][1];
      rows += choice.logprobs?.content?.length ?? 0;
    }
    usage = chunk.usage ?? usage;
  }
  checkEq(rows, usage.completion_tokens);
  return texts;
};
const completionChoices = async (body) => {
  const { choices, usage } = await call(openai.completions.create({ ...body, logprobs: 1 }));
  checkEq(choices.reduce((sum, choice) => sum + choice.logprobs.token_logprobs.length, 0), usage.completion_tokens);
  return choices.map((choice) => [choice.text, choice.finish_reason]);
};
const completionChunks = async (body) => {
  const texts = Array.from({ length: body.n }, () => ["", ""]);
  for await (const chunk of await call(openai.completions.create({ ...body, logprobs: 1, stream: true })))
    for (const choice of chunk.choices) {
      texts[choice.index][0] += choice.text;
      texts[choice.index][1] = choice.finish_reason ?? texts[choice.index][1];
    }
  return texts;
};
const checkStop = async (askWhole, askStreamed, fields) => {
  const body = { model, max_tokens: 8 + roll(33), seed: roll(999), n: 1 + roll(3), ...fields };
  const uncut = await askWhole(body);
  checkEq([await askWhole(body), await askStreamed(body), uncut.length], [uncut, uncut, body.n]);
  const match = uncut[0][0].slice(1).match(/[ -~]{2}/);
  if (!match) return;
  stops++;
  const stop = match[0], stopBody = { ...body, stop: roll(2) ? stop : [stop, "\u0001\u0002"] };
  const cut = await askWhole(stopBody);
  checkEq(await askStreamed(stopBody), cut);
  uncut.forEach(([text], index) => {
    check(!cut[index][0].includes(stop), [stopBody, cut[index]]);
    if (text.includes(stop)) checkEq(cut[index], [text.slice(0, text.indexOf(stop)), "stop"]);
  });
};
const chatStops = () => checkStop(chatChoices, chatChunks, { messages: turn() });
const completionStops = () => checkStop(completionChoices, completionChunks, { prompt: question() });

const completionMistakes = async () => {
  const [mistake, kind, code] = [
    [{ model: "nobody" }, OpenAI.NotFoundError, "model_not_found"],
    [{ n: 9 }, OpenAI.BadRequestError, "invalid_parameter"],
    [{ prompt: "x ".repeat(1900) }, OpenAI.BadRequestError, "context_length_exceeded"],
  ][roll(3)];
  checkEq((await refusal(kind, openai.completions.create({ model, prompt: "x", ...mistake }))).code, code);
};

const overloaded = async () => {
  const body = { model, prompt: "x", max_tokens: 1 }, abort = new AbortController();
  const limited = openaiClient(job.limited[0]).completions, { completions } = openai;
  const hold = { model, prompt: "hold", max_tokens: 400, stream: true };
  const stream = await completions.create(hold, { signal: abort.signal });
  await stream[Symbol.asyncIterator]().next();
  checkEq((await refusal(OpenAI.InternalServerError, completions.create(body))).code, "server_overloaded");
  abort.abort();
  const stranger = openaiClient("wrong").completions;
  checkEq((await refusal(OpenAI.AuthenticationError, stranger.create(body))).code, "invalid_api_key");
  for (const until = Date.now() + 60_000; Date.now() < until;)
    try { await completions.create(body); break; }
    catch (error) { await new Promise((done) => setTimeout(done, 20)); }
  await call(limited.create(body));
  checkEq((await refusal(OpenAI.RateLimitError, limited.create(body))).code, "rate_limit_exceeded");
};

const kinds = Object.entries({
  agents: {
    chatPlain, chatTools, chatParse, responsePlain, responseTools, responseParse, messagePlain, messageTools,
    messageParse, messageThread, openaiRefusals, anthropicRefusals, rateLimits, models,
  },
  completions: { completionMistakes, chatStops, completionStops },
  refusals: { overloaded },
}[job.kinds]);
const tried = {}, wrong = [];
for (let index = 0; calls < job.count || index < job.num_cases; index++) {
  const [name, run] = kinds[index % kinds.length];
  tried[name] = (tried[name] ?? 0) + 1;
  try { await run(); }
  catch (error) { wrong.push(`javascript, ${name}: ${error.stack ?? error}`.slice(0, 600)); }
}
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const versions = { openai: version("openai"), anthropic: version("@anthropic-ai/sdk") };
const counts = { num_calls: calls, num_stops: stops, num_refused: refusals };
console.log(JSON.stringify({ ...counts, kinds: tried, versions, wrong }));
process.exit(0);
