// Prints the names of the typed fields that requests and responses of an official SDK have, as a JSON list.
// Runs in a folder with the SDK and TypeScript: node javascript_fields.mjs MODULE:TYPE ...
import { writeFileSync } from "node:fs";
import ts from "typescript";

const roots = process.argv.slice(2).map((root) => root.split(":"));
const lines = roots.map(([module, type], at) => `export type Root${at} = import(${JSON.stringify(module)}).${type};`);
writeFileSync("roots.ts", lines.join("\n"));
const options = { strict: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022 };
const program = ts.createProgram(["roots.ts"], options);
const checker = program.getTypeChecker();
const source = program.getSourceFile("roots.ts");
const problems = program.getSemanticDiagnostics(source).map((one) => ts.flattenDiagnosticMessageText(one.messageText, " "));
if (problems.length) {
  console.error(problems.join("\n"));
  process.exit(1);
}

const waiting = source.statements.map((node) => checker.getTypeAtLocation(node.name));
const [seen, fields] = [new Set(), new Set()];
const isOfSdk = (symbol) =>
  symbol?.declarations?.some((one) => /node_modules\/(openai|@anthropic-ai)\//.test(one.getSourceFile().fileName));
while (waiting.length) {
  const type = waiting.pop();
  if (seen.has(type)) continue;
  seen.add(type);
  if (type.isUnionOrIntersection()) waiting.push(...type.types);
  if (!(type.flags & ts.TypeFlags.Object)) continue;
  waiting.push(...checker.getTypeArguments(type));
  if (!isOfSdk(type.symbol) || type.getCallSignatures().length) continue;
  for (const property of checker.getPropertiesOfType(type)) {
    if (!property.name.startsWith("_")) fields.add(property.name);
    waiting.push(checker.getTypeOfSymbol(property));
  }
}
console.log(JSON.stringify([...fields].sort()));
