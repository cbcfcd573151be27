"""The script of the attention browser, as text that stands in the page."""

SCRIPT = r"""
"use strict";
const root = document.getElementById("browser");
const find = (name) => root.querySelector("." + name);
const pictures = JSON.parse(document.getElementById("pictures").textContent);
const decoded = [];
const MEAN = -1; // the head that stands for all of them
const GAP = 1; // pixels between the maps of the overview
const now = { picture: 0, layer: 0, head: MEAN, query: 0 };

function attention() {
  // The bytes of the chosen picture, decoded when they are first asked for.
  if (!decoded[now.picture]) {
    const text = atob(document.getElementById("attention-" + now.picture).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    decoded[now.picture] = bytes;
  }
  return decoded[now.picture];
}

function looks(layer, head) {
  // How the query's attention is shared among all tokens; sums to 1.
  const { heads, tokens } = pictures[now.picture];
  const chosen = head === MEAN ? [...Array(heads).keys()] : [head];
  const shares = new Float64Array(tokens);
  for (const one of chosen) {
    const start = ((layer * heads + one) * tokens + now.query) * tokens;
    const row = attention().subarray(start, start + tokens);
    const sum = row.reduce((total, value) => total + value, 0) || 1;
    row.forEach((value, token) => (shares[token] += value / sum / chosen.length));
  }
  return shares;
}

function heat(value) {
  // 0 to 1: clear, brown, orange, yellow.
  const stops = [[154, 52, 18], [154, 52, 18], [251, 146, 60], [254, 240, 138]];
  const at = value * 3, low = Math.min(2, Math.floor(at)), part = at - low;
  const color = stops[low].map((from, i) => from + (stops[low + 1][i] - from) * part);
  return [...color, 255 * Math.min(0.92, 2.4 * value)];
}

function paint(image, shares, left, top) {
  // The map of the patches, a pixel for each, scaled to the largest.
  const { prefix, columns } = pictures[now.picture];
  const patches = shares.subarray(prefix);
  const most = patches.reduce((a, b) => Math.max(a, b), 0) || 1;
  patches.forEach((share, patch) => {
    const x = left + (patch % columns), y = top + Math.floor(patch / columns);
    image.data.set(heat(share / most), 4 * (y * image.width + x));
  });
}

function show() {
  const picture = pictures[now.picture];
  const { rows, columns, prefix, layers, heads, others } = picture;
  const shares = looks(now.layer, now.head);

  const field = find("heat").getContext("2d");
  const map = field.createImageData(columns, rows);
  paint(map, shares, 0, 0);
  field.putImageData(map, 0, 0);

  const small = find("overview").getContext("2d");
  const all = small.createImageData(find("overview").width, find("overview").height);
  for (let layer = 0; layer < layers; layer++)
    for (let head = MEAN; head < heads; head++)
      paint(all, looks(layer, head), (head + 1) * (columns + GAP), layer * (rows + GAP));
  small.putImageData(all, 0, 0);
  place(find("cell"), now.layer, now.head + 1, layers, heads + 1);

  const patch = now.query - prefix;
  find("query").hidden = patch < 0;
  if (patch >= 0) place(find("query"), Math.floor(patch / columns), patch % columns, rows, columns);
  for (const [token, button] of [...find("others").children].entries()) {
    button.setAttribute("aria-pressed", token === now.query);
    button.lastChild.textContent = " gets " + percent(shares[token]);
  }
  const head = now.head === MEAN ? "mean of heads" : "head " + now.head;
  find("layer").value = now.layer;
  find("head").value = now.head;
  find("layer").previousElementSibling.textContent = now.layer;
  find("head").previousElementSibling.textContent = now.head === MEAN ? "mean of all" : now.head;
  find("head").setAttribute("aria-valuetext", head);
  const most = shares.indexOf(shares.reduce((a, b) => Math.max(a, b)));
  const target = most === now.query ? "itself" : called(most, others, prefix, columns);
  find("told").textContent = "layer " + now.layer + ", " + head + ": " +
    (patch < 0 ? "" : "patch ") + called(now.query, others, prefix, columns) +
    " looks mostly at " + target + " (" + percent(shares[most]) + " of its attention)";
}

function called(token, others, prefix, columns) {
  if (token < prefix) return "the " + others[token];
  const patch = token - prefix;
  return "row " + Math.floor(patch / columns) + ", column " + (patch % columns);
}

function percent(share) {
  return (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";
}

function place(box, row, column, rows, columns) {
  Object.assign(box.style, {
    left: (100 * column) / columns + "%", width: 100 / columns + "%",
    top: (100 * row) / rows + "%", height: 100 / rows + "%",
  });
}

function under(event, element, rows, columns) {
  // Row and column of a grid over the element, below the pointer.
  const box = element.getBoundingClientRect();
  const part = (at, start, size, count) =>
    Math.max(0, Math.min(count - 1, Math.floor(((at - start) / size) * count)));
  return [part(event.clientY, box.top, box.height, rows),
    part(event.clientX, box.left, box.width, columns)];
}

function choose(number) {
  now.picture = number;
  const picture = pictures[number];
  const { rows, columns, prefix, layers, heads, box, others } = picture;
  const buttons = [...find("choose").children];
  buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === number));
  const shown = root.querySelector(".stage img");
  shown.src = buttons[number].firstChild.src;
  shown.alt = picture.name;
  const [top, left, height, width] = box.map((part) => 100 * part + "%");
  Object.assign(find("field").style, { top, left, height, width });
  Object.assign(find("heat"), { width: columns, height: rows });
  const wide = (heads + 1) * (columns + GAP) - GAP, high = layers * (rows + GAP) - GAP;
  Object.assign(find("overview"), { width: wide, height: high });
  find("all").style.maxWidth = (heads + 1) * 4.5 + "rem";
  find("layer").max = layers - 1;
  find("head").max = heads - 1;
  find("others").replaceChildren(...others.map((name, token) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(name, document.createElement("span"));
    button.onclick = () => ask(token);
    return button;
  }));
  now.layer = Math.min(now.layer, layers - 1);
  if (now.query >= picture.tokens) now.query = prefix;
  show();
}

function ask(query) {
  now.query = query;
  show();
}

function point(event) {
  const { rows, columns, prefix } = pictures[now.picture];
  const [row, column] = under(event, find("field"), rows, columns);
  const query = prefix + row * columns + column;
  if (query !== now.query) ask(query);
}

[...find("choose").children].forEach((button, n) => (button.onclick = () => choose(n)));
find("layer").oninput = (event) => { now.layer = Number(event.target.value); show(); };
find("head").oninput = (event) => { now.head = Number(event.target.value); show(); };
find("field").onclick = point;
find("field").onpointermove = (event) => {
  if (event.pointerType === "mouse" && event.buttons === 1) point(event);
};
find("field").onkeydown = (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!(event.key in step)) return;
  event.preventDefault();
  const { rows, columns, prefix } = pictures[now.picture];
  const patch = Math.max(0, now.query - prefix);
  const row = Math.floor(patch / columns) + step[event.key][0];
  const column = (patch % columns) + step[event.key][1];
  if (row >= 0 && row < rows && column >= 0 && column < columns)
    ask(prefix + row * columns + column);
};
find("all").onpointermove = find("all").onclick = (event) => {
  const { layers, heads } = pictures[now.picture];
  const [layer, column] = under(event, find("all"), layers, heads + 1);
  find("all").title = "layer " + layer + ", " + (column ? "head " + (column - 1) : "mean of heads");
  if (event.type === "click") { now.layer = layer; now.head = column - 1; show(); }
};

now.layer = pictures[0].layers - 1;
now.query = pictures[0].prefix &&
  pictures[0].others[0] === "class token" ? 0 : pictures[0].middle;
choose(0);
"""
