// The attention browser of the inspection page: choose an image, a layer, a head and a patch.
"use strict";
const root = document.getElementById("attention-browser");
const find = (name) => root.querySelector("." + name);
const images = JSON.parse(document.getElementById("browser-data").textContent);
const decoded = [];
const MEAN = -1; // in place of a head: the mean of all
const now = { image: 0, layer: 0, head: MEAN, query: 0 };

// Colors of 0 to 255, brown to orange to yellow: transparent at 0, and on a dark background.
const STOPS = [[154, 52, 18], [154, 52, 18], [251, 146, 60], [254, 240, 138]];
const BACKGROUND = [28, 25, 23];
const TRANSPARENT = Array.from({ length: 256 }, (_, value) => {
  const at = (value / 255) * 3, low = Math.min(2, Math.floor(at));
  const color = STOPS[low].map((from, i) => from + (STOPS[low + 1][i] - from) * (at - low));
  return [...color, Math.min(235, 2.4 * value)];
});
const OPAQUE = TRANSPARENT.map(([red, green, blue, alpha]) =>
  [...[red, green, blue].map((c, i) => BACKGROUND[i] + ((c - BACKGROUND[i]) * alpha) / 255), 255]);

function bytesOf(name) {
  const text = atob(document.getElementById(name + "-" + now.image).textContent);
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

function attention() {
  // Bytes of the chosen image, and the attention that each row's 255 stands for; decoded on demand.
  if (!decoded[now.image]) {
    const peaks = new Float32Array(bytesOf("peaks").buffer);
    decoded[now.image] = { bytes: bytesOf("attention"), peaks };
  }
  return decoded[now.image];
}

function columnsOf(heads) {
  // Heads of the overview: their mean, then each; no mean of a single one.
  return heads === 1 ? [0] : Array.from({ length: heads + 1 }, (_, column) => column + MEAN);
}

function attentionOf(layer, head) {
  // The query's attention to all tokens; sums to 1 up to rounding.
  const { heads, tokens } = images[now.image];
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
  // One pixel per patch, scaled to the maximum.
  const { prefix, columns } = images[now.image];
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
  const { rows, columns, prefix, layers, heads, gap, prefixNames } = images[now.image];
  const shares = attentionOf(now.layer, now.head);
  draw(find("heat"), (image) => paint(image, shares, 0, 0, TRANSPARENT));
  draw(find("overview"), (image) => {
    for (let layer = 0; layer < layers; layer++)
      columnsOf(heads).forEach((head, column) => {
        const left = column * (columns + gap), top = layer * (rows + gap);
        paint(image, attentionOf(layer, head), left, top, OPAQUE);
      });
  });
  const cells = columnsOf(heads);
  place(find("cell"), now.layer, cells.indexOf(now.head), layers, cells.length);

  const patch = now.query - prefix;
  find("query").hidden = patch < 0;
  if (patch >= 0) place(find("query"), Math.floor(patch / columns), patch % columns, rows, columns);
  [...find("prefix").children].forEach((button, token) => {
    button.setAttribute("aria-pressed", token === now.query);
    button.lastChild.textContent = " " + percent(shares[token]);
  });

  const head = now.head === MEAN ? "mean of heads" : "head " + now.head;
  find("layer").value = now.layer;
  find("head").value = now.head;
  find("layer").previousElementSibling.textContent = now.layer;
  find("head").previousElementSibling.textContent = now.head === MEAN ? "mean of heads" : now.head;
  find("head").setAttribute("aria-valuetext", head);
  const most = shares.indexOf(shares.reduce((a, b) => Math.max(a, b)));
  const nameOf = (token) => token < prefix ? "the " + prefixNames[token] :
    "row " + Math.floor((token - prefix) / columns) + ", column " + ((token - prefix) % columns);
  find("status").textContent = "layer " + now.layer + (heads === 1 ? "" : ", " + head) + ": " +
    (patch < 0 ? "" : "patch ") + nameOf(now.query) + " attends mostly to " +
    (most === now.query ? "itself" : nameOf(most)) + " (" + percent(shares[most]) + ")";
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

function cellAt(event, element, rows, columns) {
  // Row and column of a grid over the element at the pointer.
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
  now.image = number;
  const { name, rows, columns, prefix, layers, heads, tokens, gap, box, prefixNames } =
    images[number];
  const buttons = [...find("choose").children];
  buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === number));
  const shown = root.querySelector(".stage img");
  Object.assign(shown, { src: buttons[number].querySelector("img").src, alt: name });
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
  find("prefix").replaceChildren(...prefixNames.map((name, token) => {
    const button = element("button", name, element("span"));
    button.type = "button";
    button.onclick = () => setQuery(token);
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

function setQuery(query) {
  now.query = query;
  show();
}

function point(event) {
  const { rows, columns, prefix } = images[now.image];
  const [row, column] = cellAt(event, find("field"), rows, columns);
  const query = prefix + row * columns + column;
  if (query !== now.query) setQuery(query);
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
  const { rows, columns, prefix, middle } = images[now.image];
  if (now.query < prefix) return setQuery(middle);
  const row = Math.floor((now.query - prefix) / columns) + steps[event.key][0];
  const column = ((now.query - prefix) % columns) + steps[event.key][1];
  if (row >= 0 && row < rows && column >= 0 && column < columns)
    setQuery(prefix + row * columns + column);
};
find("all").onpointermove = find("all").onclick = (event) => {
  const { layers, heads } = images[now.image];
  const cells = columnsOf(heads);
  const [layer, column] = cellAt(event, find("all"), layers, cells.length);
  const head = cells[column];
  find("all").title = "layer " + layer + ", " + (head === MEAN ? "mean of heads" : "head " + head);
  if (event.type === "click") { Object.assign(now, { layer, head }); show(); }
};

now.layer = images[0].layers - 1;
now.query = images[0].prefixNames[0] === "class token" ? 0 : images[0].middle;
choose(0);
