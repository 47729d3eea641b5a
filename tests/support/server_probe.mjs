// Runs the page's server.js: the stream on stdin is what a server answers with; prints what the page was given.
import { pathToFileURL } from "node:url";

let text = "";
for await (const piece of process.stdin) text += piece;
const sent = [];
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async (path, options) => {
  sent.push(JSON.parse(options.body));
  return new Response(text);
};
const { answerTo } = await import(pathToFileURL(`${process.argv[2]}/server.js`));
const calls = [];
const result = await answerTo({ model: "m" }, null, (delta) => calls.push(["delta", delta]), (progress) =>
  calls.push(["progress", progress]));
console.log(JSON.stringify({ sent: sent[0], calls, reason: result.reason }));
