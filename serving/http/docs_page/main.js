// Shows each route of openapi.json with a form that sends a request. Nothing is loaded from another host.

import { el } from "../dashboard/dom.js";
import { exampleOf, resolved, schemaView } from "./schema.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const SHOWN_CHARACTERS = 100_000;

/** A text whose parts between backticks are shown as code. */
function prose(text) {
  return String(text ?? "").split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

function part(title, ...children) {
  return el("div", { class: "part" }, el("h3", {}, title), ...children);
}

function row(...cells) {
  return el("tr", {}, ...cells.map((cell) => el("td", {}, cell)));
}

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function parametersView(root, parameters) {
  const rows = parameters.map((parameter) => {
    const what = el("div", {}, ...prose(parameter.description ?? resolved(root, parameter.schema)?.description));
    const name = el("code", {}, parameter.name);
    const where = parameter.in + (parameter.required ? ", required" : "");
    return row(name, where, el("div", {}, schemaView(root, parameter.schema ?? {}, { isShort: true }), what));
  });
  return part("Parameters", table(["Name", "Where", "Value"], rows));
}

function contentView(root, content) {
  return Object.entries(content ?? {}).map(([type, media]) =>
    el("div", { class: "media" }, el("p", {}, el("code", {}, type)), schemaView(root, media.schema ?? {})),
  );
}

function responsesView(root, responses) {
  const parts = Object.entries(responses ?? {}).map(([status, sent]) => {
    const response = resolved(root, sent);
    const summary = el("summary", {}, el("code", {}, status), " ", ...prose(response.description));
    return el("details", {}, summary, ...contentView(root, response.content));
  });
  return part("Answers", ...parts);
}

/** The form of one operation: its parameters, its body, and the response. */
function form(root, method, path, operation, parameters) {
  const fields = parameters.map((parameter) => {
    const value = parameter.example ?? resolved(root, parameter.schema)?.example ?? "";
    return { parameter, input: el("input", { value, spellcheck: "false", autocomplete: "off" }) };
  });
  const body = resolved(root, operation.requestBody);
  const media = body?.content?.["application/json"];
  const written = media && JSON.stringify(media.example ?? exampleOf(root, media.schema), null, 2);
  const text = media && el("textarea", { rows: "8", spellcheck: "false", "aria-label": "Body, JSON" });
  if (text) text.value = written;
  const status = el("p", { role: "status" });
  const answer = el("pre", { hidden: true, tabindex: "0" });

  async function send() {
    status.textContent = "Waiting for the answer.";
    const headers = {};
    const query = new URLSearchParams();
    let url = path;
    for (const { parameter, input } of fields) {
      if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value === "") continue;
      else if (parameter.in === "query") query.append(parameter.name, input.value);
      else if (parameter.in === "header") headers[parameter.name] = input.value;
    }
    const token = document.getElementById("token").value;
    if (token) headers.Authorization = `Bearer ${token}`;
    if (text) headers["Content-Type"] = "application/json";
    const asked = query.size ? `${url}?${query}` : url;
    const began = performance.now();
    try {
      const response = await fetch(asked.replace(/^\//, ""), { method: method.toUpperCase(), headers, body: text?.value });
      const raw = await response.text();
      status.textContent = `${response.status} ${response.statusText}, ${Math.round(performance.now() - began)} ms`;
      answer.textContent = pretty(raw).slice(0, SHOWN_CHARACTERS);
    } catch (error) {
      status.textContent = `No answer: ${error.message}`;
      answer.textContent = "";
    }
    answer.hidden = answer.textContent === "";
  }

  const button = el("button", { type: "button" }, "Send");
  button.addEventListener("click", send);
  const labels = fields.map(({ parameter, input }) => el("label", {}, el("span", {}, parameter.name), input));
  return part("Try it", el("div", { class: "fields" }, ...labels), text, el("p", {}, button), status, answer);
}

function pretty(raw) {
  try {
    return JSON.stringify(JSON.parse(raw), null, 2);
  } catch {
    return raw;
  }
}

function operationView(root, method, path, shared, operation) {
  const parameters = [...shared, ...(operation.parameters ?? [])].map((each) => resolved(root, each));
  const heading = el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), " ", el("code", {}, path));
  if (operation.summary) heading.append(" ", operation.summary);
  const route = el("details", { class: "route", id: `${method}-${path}` }, heading);
  // Draw a route only when it is opened: a schema may be large, and most are never opened.
  route.addEventListener("toggle", () => {
    if (route.childElementCount > 1) return;
    if (operation.description) route.append(el("p", {}, ...prose(operation.description)));
    const scopes = (operation.security ?? []).flatMap((each) => Object.values(each).flat());
    if (scopes.length) route.append(el("p", {}, "Scope of the token: ", el("code", {}, scopes.join(", "))));
    if (parameters.length) route.append(parametersView(root, parameters));
    const body = resolved(root, operation.requestBody);
    if (body) route.append(part("Body", ...contentView(root, body.content)));
    route.append(responsesView(root, operation.responses), form(root, method, path, operation, parameters));
  });
  return route;
}

function draw(root) {
  document.getElementById("title").textContent = `${root.info?.title ?? "HTTP API"} ${root.info?.version ?? ""}`.trim();
  document.getElementById("description").replaceChildren(...prose(root.info?.description));
  document.getElementById("token-label").hidden = !root.components?.securitySchemes;
  const routes = Object.entries(root.paths ?? {}).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) =>
      operationView(root, method, path, item.parameters ?? [], item[method]),
    ),
  );
  document.getElementById("routes").replaceChildren(...routes);
  const chosen = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (chosen instanceof HTMLDetailsElement) chosen.open = true;
}

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`status ${response.status}`);
  draw(await response.json());
} catch (error) {
  const trouble = document.getElementById("trouble");
  trouble.textContent = `openapi.json cannot be read: ${error.message}`;
  trouble.hidden = false;
}
