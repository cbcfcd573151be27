"""The script of the attention browser, as text that stands in the page."""

SCRIPT = r"""
"use strict";
const root = document.getElementById("browser");
const find = (name) => root.querySelector("." + name);
const pictures = JSON.parse(document.getElementById("pictures").textContent);
const decoded = [];
const MEAN = -1; // the head that stands for all of them
const now = { picture: 0, layer: 0, head: MEAN, query: 0 };

// Colors of 0 to 255, brown to orange to yellow: clear below, and on dark ground.
const STOPS = [[154, 52, 18], [154, 52, 18], [251, 146, 60], [254, 240, 138]];
const GROUND = [28, 25, 23];
const CLEAR = Array.from({ length: 256 }, (_, value) => {
  const at = (value / 255) * 3, low = Math.min(2, Math.floor(at));
  const color = STOPS[low].map((from, i) => from + (STOPS[low + 1][i] - from) * (at - low));
  return [...color, Math.min(235, 2.4 * value)];
});
const SOLID = CLEAR.map(([red, green, blue, alpha]) =>
  [...[red, green, blue].map((c, i) => GROUND[i] + ((c - GROUND[i]) * alpha) / 255), 255]);

function bytesOf(name) {
  const text = atob(document.getElementById(name + "-" + now.picture).textContent);
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

function attention() {
  // The bytes of the chosen picture, and what each row's 255 stands for; decoded when first asked.
  if (!decoded[now.picture]) {
    const peaks = new Float32Array(bytesOf("peaks").buffer);
    decoded[now.picture] = { bytes: bytesOf("attention"), peaks };
  }
  return decoded[now.picture];
}

function columnsOf(heads) {
  // The heads of the overview: their mean, then each; a single one needs no mean.
  return heads === 1 ? [0] : Array.from({ length: heads + 1 }, (_, column) => column + MEAN);
}

function looks(layer, head) {
  // How the query's attention is shared among all tokens; sums to 1, but for rounding.
  const { heads, tokens } = pictures[now.picture];
  const chosen = head === MEAN ? [...Array(heads).keys()] : [head];
  const shares = new Float64Array(tokens);
  const { bytes, peaks } = attention();
  for (const one of chosen) {
    const place = (layer * heads + one) * tokens + now.query;
    const row = bytes.subarray(place * tokens, (place + 1) * tokens);
    const part = peaks[place] / 255 / chosen.length;
    row.forEach((value, token) => (shares[token] += value * part));
  }
  return shares;
}

function paint(image, shares, left, top, colors) {
  // The map of the patches, a pixel for each, scaled to the largest.
  const { prefix, columns } = pictures[now.picture];
  const patches = shares.subarray(prefix);
  const most = patches.reduce((a, b) => Math.max(a, b), 0) || 1;
  patches.forEach((share, patch) => {
    const x = left + (patch % columns), y = top + Math.floor(patch / columns);
    image.data.set(colors[Math.round((255 * share) / most)], 4 * (y * image.width + x));
  });
}

function draw(canvas, paintOn) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  paintOn(image);
  context.putImageData(image, 0, 0);
}

function show() {
  const { rows, columns, prefix, layers, heads, gap, others } = pictures[now.picture];
  const shares = looks(now.layer, now.head);
  draw(find("heat"), (image) => paint(image, shares, 0, 0, CLEAR));
  draw(find("overview"), (image) => {
    for (let layer = 0; layer < layers; layer++)
      columnsOf(heads).forEach((head, column) => {
        const left = column * (columns + gap), top = layer * (rows + gap);
        paint(image, looks(layer, head), left, top, SOLID);
      });
  });
  const cells = columnsOf(heads);
  place(find("cell"), now.layer, cells.indexOf(now.head), layers, cells.length);

  const patch = now.query - prefix;
  find("query").hidden = patch < 0;
  if (patch >= 0) place(find("query"), Math.floor(patch / columns), patch % columns, rows, columns);
  [...find("others").children].forEach((button, token) => {
    button.setAttribute("aria-pressed", token === now.query);
    button.lastChild.textContent = " gets " + percent(shares[token]);
  });

  const head = now.head === MEAN ? "mean of heads" : "head " + now.head;
  find("layer").value = now.layer;
  find("head").value = now.head;
  find("layer").previousElementSibling.textContent = now.layer;
  find("head").previousElementSibling.textContent = now.head === MEAN ? "mean of heads" : now.head;
  find("head").setAttribute("aria-valuetext", head);
  const most = shares.indexOf(shares.reduce((a, b) => Math.max(a, b)));
  const called = (token) => token < prefix ? "the " + others[token] :
    "row " + Math.floor((token - prefix) / columns) + ", column " + ((token - prefix) % columns);
  find("told").textContent = "layer " + now.layer + (heads === 1 ? "" : ", " + head) + ": " +
    (patch < 0 ? "" : "patch ") + called(now.query) + " looks mostly at " +
    (most === now.query ? "itself" : called(most)) + " (" + percent(shares[most]) +
    " of its attention)";
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
  // Row and column, below the pointer, of a grid over the element.
  const box = element.getBoundingClientRect();
  const part = (at, size, count) =>
    Math.max(0, Math.min(count - 1, Math.floor((at / size) * count)));
  return [part(event.clientY - box.top, box.height, rows),
    part(event.clientX - box.left, box.width, columns)];
}

function element(kind, ...inside) {
  const made = document.createElement(kind);
  made.append(...inside);
  return made;
}

function choose(number) {
  now.picture = number;
  const { name, rows, columns, prefix, layers, heads, tokens, gap, box, others } = pictures[number];
  const buttons = [...find("choose").children];
  buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === number));
  const shown = root.querySelector(".stage img");
  Object.assign(shown, { src: buttons[number].firstChild.src, alt: name });
  const [top, left, height, width] = box.map((part) => 100 * part + "%");
  Object.assign(find("field").style, { top, left, height, width });
  Object.assign(find("heat"), { width: columns, height: rows });
  const cells = columnsOf(heads);
  Object.assign(find("overview"), {
    width: cells.length * (columns + gap) - gap, height: layers * (rows + gap) - gap,
  });
  find("labeled").style.maxWidth = cells.length * 5 + 2 + "rem";
  find("across").replaceChildren(
    ...cells.map((head) => element("span", head === MEAN ? "mean" : String(head))));
  find("down").replaceChildren(
    ...Array.from({ length: layers }, (_, layer) => element("span", String(layer))));
  find("others").replaceChildren(...others.map((other, token) => {
    const button = element("button", other, element("span"));
    button.type = "button";
    button.onclick = () => ask(token);
    return button;
  }));
  find("layer").max = layers - 1;
  find("head").min = cells[0];
  find("head").max = heads - 1;
  find("head").parentElement.hidden = heads === 1;
  now.layer = Math.min(now.layer, layers - 1);
  now.head = Math.min(Math.max(now.head, cells[0]), heads - 1);
  if (now.query >= tokens) now.query = prefix;
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
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!(event.key in steps)) return;
  event.preventDefault(); // the page does not scroll
  const { rows, columns, prefix, middle } = pictures[now.picture];
  if (now.query < prefix) return ask(middle);
  const row = Math.floor((now.query - prefix) / columns) + steps[event.key][0];
  const column = ((now.query - prefix) % columns) + steps[event.key][1];
  if (row >= 0 && row < rows && column >= 0 && column < columns)
    ask(prefix + row * columns + column);
};
find("all").onpointermove = find("all").onclick = (event) => {
  const { layers, heads } = pictures[now.picture];
  const cells = columnsOf(heads);
  const [layer, column] = under(event, find("all"), layers, cells.length);
  const head = cells[column];
  find("all").title = "layer " + layer + ", " + (head === MEAN ? "mean of heads" : "head " + head);
  if (event.type === "click") { Object.assign(now, { layer, head }); show(); }
};

now.layer = pictures[0].layers - 1;
now.query = pictures[0].others[0] === "class token" ? 0 : pictures[0].middle;
choose(0);
"""
