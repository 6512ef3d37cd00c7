// JSON schemas as nested lists; a referenced schema is drawn only when it is opened, so that cycles do no harm.

import { el } from "../dashboard/dom.js";

const LIMITS = {
  minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below",
  minLength: "characters at least", maxLength: "characters at most", minItems: "entries at least",
  maxItems: "entries at most", minProperties: "fields at least", maxProperties: "fields at most", pattern: "like", format: "format",
};
const CHOICES = { anyOf: "one or more of", oneOf: "one of", allOf: "all of" };
const DEPTH_MAX = 6;

/** The node, or the node that it refers to. */
export function resolved(root, node) {
  let found = node;
  for (let steps = 0; found?.$ref !== undefined && steps < 10; steps += 1) {
    const names = found.$ref.replace(/^#\//, "").split("/");
    found = names.reduce((at, name) => at?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], root);
  }
  return found;
}

function nameOf(node) {
  return node?.$ref?.split("/").pop();
}

function typeOf(root, node) {
  if (nameOf(node)) return nameOf(node);
  if (node.const !== undefined) return JSON.stringify(node.const);
  if (node.enum) return node.enum.map((value) => JSON.stringify(value)).join(" | ");
  for (const choice of Object.keys(CHOICES)) {
    if (node[choice]) return node[choice].map((each) => typeOf(root, each)).join(choice === "allOf" ? " & " : " | ");
  }
  if (node.type === "array") return `list of ${typeOf(root, node.items ?? {})}`;
  return [node.type ?? "any value"].flat().join(" | ");
}

function limitsOf(node) {
  const found = Object.entries(LIMITS).filter(([name]) => node[name] !== undefined).map(([name, words]) => `${words} ${node[name]}`);
  if (node.default !== undefined) found.push(`${JSON.stringify(node.default)} unless sent`);
  return found.join(", ");
}

function line(root, node) {
  const limits = limitsOf(node);
  return [el("code", { class: "type" }, typeOf(root, node)), limits && ` (${limits})`, node.description && `: ${node.description}`];
}

function fields(root, node) {
  const required = new Set(node.required ?? []);
  const items = Object.entries(node.properties ?? {}).map(([name, field]) =>
    el("li", {}, el("code", {}, name), required.has(name) ? " required, " : " ", schemaView(root, field)),
  );
  if (typeof node.additionalProperties === "object") {
    items.push(el("li", {}, "any other name ", schemaView(root, node.additionalProperties)));
  }
  return items.length ? [el("ul", {}, ...items)] : [];
}

function below(root, node) {
  const parts = fields(root, node);
  if (node.items) parts.push(...inner(root, node.items));
  for (const [choice, words] of Object.entries(CHOICES)) {
    const isPlain = (node[choice] ?? []).every((each) => !each.$ref && !each.properties && !each.items && !each.description);
    if (!node[choice] || isPlain) continue;
    const parted = node[choice].map((each) => el("li", {}, schemaView(root, each)));
    parts.push(el("p", {}, words), el("ul", {}, ...parted));
  }
  return parts;
}

function inner(root, node) {
  return node.$ref || node.properties || node.items || Object.keys(CHOICES).some((choice) => node[choice]) ? [schemaView(root, node)] : [];
}

/** A schema: its type and bounds and, unless `isShort`, its contents. */
export function schemaView(root, node, { isShort = false } = {}) {
  if (isShort) return el("span", {}, ...line(root, { ...resolved(root, node), description: undefined }));
  if (!node.$ref) return el("span", {}, ...line(root, node), ...below(root, node));
  const named = el("details", {}, el("summary", {}, el("code", { class: "type" }, nameOf(node))));
  named.addEventListener("toggle", () => {
    if (named.childElementCount === 1) named.append(schemaView(root, resolved(root, node) ?? {}));
  });
  return named;
}

/** An example value with the schema's required fields, as a start for a request. */
export function exampleOf(root, sent, depth = 0) {
  const node = resolved(root, sent) ?? {};
  if (node.example !== undefined) return node.example;
  if (node.examples?.length) return node.examples[0];
  if (node.default !== undefined) return node.default;
  if (node.const !== undefined) return node.const;
  if (node.enum) return node.enum[0];
  if (depth > DEPTH_MAX) return null;
  for (const choice of Object.keys(CHOICES)) {
    if (node[choice]) return exampleOf(root, node[choice][0], depth + 1);
  }
  if (node.type === "object" || node.properties) {
    const wanted = node.required ?? [];
    return Object.fromEntries(wanted.map((name) => [name, exampleOf(root, node.properties?.[name] ?? {}, depth + 1)]));
  }
  if (node.type === "array") return [exampleOf(root, node.items ?? {}, depth + 1)];
  if (node.type === "integer" || node.type === "number") return node.minimum ?? 1;
  if (node.type === "boolean") return true;
  return node.type === "string" ? "string" : null;
}
