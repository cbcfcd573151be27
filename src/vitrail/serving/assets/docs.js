// Renders openapi.json: routes, parameters, responses, and a form to try them.

const TOKEN = "vitrail token"; // shared with the web page
const METHODS = ["post", "get"]; // in this order
const DEEP = 6; // levels of a schema that are shown
const LONG = 20_000; // characters of a response that are shown
const find = (id) => document.getElementById(id);

function make(kind, attributes = {}, ...inside) {
  const made = Object.assign(document.createElement(kind), attributes);
  made.append(...inside);
  return made;
}

function withCode(text) {
  // Render text between backquotes as code.
  return text.split("`").map((part, place) => (place % 2 ? make("code", {}, part) : part));
}

function follow(schema, spec) {
  // Resolve a reference: "#/components/schemas/Name".
  return schema.$ref ? spec.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

function written(schema, spec, depth = 0) {
  // Format a schema like an example, with types for values.
  const known = follow(schema, spec), pad = "  ".repeat(depth);
  const either = known.anyOf;
  if (depth > DEEP) return "…";
  if (either) return either.map((one) => written(one, spec, depth)).join(" or ");
  if (known.type === "array") return "[" + written(known.items, spec, depth) + ", …]";
  if (known.properties) {
    const lines = Object.entries(known.properties).map(
      ([name, of]) => pad + "  " + JSON.stringify(name) + ": " + written(of, spec, depth + 1));
    return "{\n" + lines.join(",\n") + "\n" + pad + "}";
  }
  if (known.enum) return known.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (known.format === "binary") return "bytes";
  return { integer: "integer", number: "number", string: "string", boolean: "boolean",
    null: "null", object: "object" }[known.type] ?? "any";
}

function parametersOf(route, spec) {
  if (!route.parameters.length) return [];
  const rows = route.parameters.map(({ name, in: where, required, description, schema }) => {
    const usual = schema?.default === undefined || schema.default === null ? "" :
      ", default " + schema.default;
    const type = written(schema, spec).replace(" or null", "") + usual;
    return make("tr", {}, make("td", {}, make("code", {}, name)),
      make("td", {}, type + (where === "path" ? ", in the path" : "") +
        (required && where !== "path" ? ", required" : "")),
      make("td", { className: "soft" }, description ?? ""));
  });
  return [make("h2", {}, "Parameters"), make("div", { className: "wide" }, make("table", {}, ...rows))];
}

function contentOf(content, spec) {
  // Content types with their schema; types of the same schema are grouped.
  const kinds = new Map();
  for (const [kind, { schema }] of Object.entries(content)) {
    const shape = written(schema, spec);
    kinds.set(shape, [...(kinds.get(shape) ?? []), kind]);
  }
  return [...kinds].map(([shape, names]) => make("pre", {}, names.join(", ") + "\n" + shape));
}

function bodyOf(route, spec) {
  const content = route.requestBody?.content;
  return content ? [make("h2", {}, "Body"), ...contentOf(content, spec)] : [];
}

function answersOf(route, spec) {
  const { 200: answer, ...errors } = route.responses;
  const rows = Object.entries(errors).map(([status, { description }]) =>
    make("tr", {}, make("td", {}, make("code", {}, status)), make("td", {}, description)));
  return [make("h2", {}, "Response"),
    make("p", { className: "soft" }, make("code", {}, "200"), " " + answer.description),
    ...contentOf(answer.content, spec), make("h2", {}, "Errors"),
    make("div", { className: "wide" }, make("table", {}, ...rows))];
}

function tryOf(path, method, route, spec) {
  // A form that sends the request and shows the response.
  const { parameters } = route;
  const fields = parameters.map(({ name, required, schema }) => make("label", {}, name,
    make("input", { name, required: Boolean(required), placeholder: schema?.default ?? "" })));
  const kinds = Object.keys(route.requestBody?.content ?? {});
  const form = kinds.includes("multipart/form-data");
  const file = make("input", { type: "file", accept: "image/*", required: true, multiple: form });
  const result = make("div", { className: "result", role: "status" });
  const made = make("form", {}, ...fields, ...(kinds.length ? [make("label", {}, "image", file)] : []),
    make("button", { className: "main" }, "Send"), result);
  made.onsubmit = (event) => {
    event.preventDefault();
    const values = parameters.map((one) => [one, made.elements[one.name].value]);
    send(address(path, values), method, kinds.length ? packed([...file.files], form) : undefined, result);
  };
  return [make("h2", {}, "Try it"), made];
}

function address(path, values) {
  const query = new URLSearchParams();
  for (const [{ name, in: where }, value] of values)
    if (where === "path") path = path.replace("{" + name + "}", encodeURIComponent(value));
    else if (value !== "") query.set(name, value);
  return path.slice(1) + (query.size ? "?" + query : ""); // beside this page, wherever that is
}

function packed(files, form) {
  if (files.length === 1) return files[0];
  const body = new FormData();
  for (const file of files) body.append("pictures", file);
  return form ? body : files[0];
}

async function send(where, method, body, result) {
  const token = find("token").value;
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const begun = performance.now();
  try {
    const response = await fetch(where || "./", { method: method.toUpperCase(), body, headers });
    const blob = await response.blob();
    const took = Math.round(performance.now() - begun);
    const line = response.status + " " + response.statusText + ", " + took + " ms, " +
      blob.size.toLocaleString("en") + " bytes of " + (blob.type || "nothing");
    result.replaceChildren(make("code", {}, line), await shown(blob));
  } catch {
    result.replaceChildren("The server does not respond. Is it still running?");
  }
}

async function shown(blob) {
  if (blob.type.startsWith("image/"))
    return make("img", { src: URL.createObjectURL(blob), alt: "response" });
  const text = await blob.text();
  const pretty = blob.type.startsWith("application/json") ?
    JSON.stringify(JSON.parse(text), null, 2) : text;
  return make("pre", {}, pretty.length > LONG ? pretty.slice(0, LONG) + "\n…" : pretty);
}

function drawRoute(path, method, route, spec) {
  const summary = make("summary", {}, make("span", { className: "verb " + method },
    method.toUpperCase()), make("code", {}, path), make("span", { className: "soft" },
    route.summary ?? ""));
  return make("details", {}, summary, make("div", { className: "inside" },
    ...parametersOf(route, spec), ...bodyOf(route, spec), ...answersOf(route, spec),
    ...tryOf(path, method, route, spec)));
}

async function begin() {
  document.querySelector("header form").onsubmit = (event) => event.preventDefault();
  try {
    find("token").value = sessionStorage.getItem(TOKEN) ?? "";
    find("token").onchange = ({ target }) => sessionStorage.setItem(TOKEN, target.value);
  } catch {
    // storage is refused: the token is in its field
  }
  try {
    const spec = await (await fetch("openapi.json")).json();
    find("about").replaceChildren(...withCode(spec.info?.description ?? ""));
    const routes = METHODS.flatMap((method) => Object.entries(spec.paths)
      .filter(([, of]) => of[method])
      .map(([path, of]) => drawRoute(path, method, of[method], spec)));
    find("routes").replaceChildren(...routes);
  } catch {
    find("about").textContent = "openapi.json cannot be read. Is the server still running?";
  }
}

begin();
