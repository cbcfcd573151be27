// The mosaic over the image, one glass pane per patch, and the rose window of the empty page.

const still = matchMedia("(prefers-reduced-motion: reduce)");
const JEWELS = [[176, 24, 60], [28, 78, 168], [12, 120, 84], [222, 150, 24], [108, 52, 160]];
const LEAD = "24 20 18"; // color of the lead between the panes
const NIGHT = "10 8 22"; // color of a dark pane
const GOLD = "255 200 84"; // color of a bright pane
const SETTLING = 130; // time constant of the animation in milliseconds

class Glass {
  // Every pane has a tint (opacity of its own color), a dark and a gold value; every change sets new
  // targets that the panes animate to, each with its own delay. Reduced motion skips the animation.
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.pending = 0;
    this.lay(1, 1, [[0, 0, 0]]);
    new ResizeObserver(() => this.begin()).observe(canvas);
  }

  lay(rows, columns, colors, lag = 0) {
    // New, clear panes; the receptive fields of their patches are `lag` panes up and to the left.
    const count = rows * columns;
    Object.assign(this, { rows, columns, colors, count, lag, shimmer: false });
    this.current = { tint: new Float32Array(count), dark: new Float32Array(count),
      gold: new Float32Array(count), lead: new Float32Array(1) };
    this.phase = Float32Array.from({ length: count }, () => 7 * Math.random());
    this.aim({});
  }

  aim({ tint, dark, gold, lead = 0, delay, shimmer = false }) {
    // Targets that are omitted become clear. Delays are milliseconds from now, one for each pane.
    const clear = new Float32Array(this.count);
    this.target = { tint: tint ?? clear, dark: dark ?? clear, gold: gold ?? clear, lead: [lead] };
    this.since = performance.now();
    Object.assign(this, { delay: delay ?? clear, shimmer });
    this.before = this.since;
    this.begin();
  }

  begin() {
    if (!this.pending) this.pending = requestAnimationFrame((time) => this.frame(time));
  }

  frame(time) {
    this.pending = 0;
    const moving = this.move(Math.max(time, this.before));
    this.draw(time);
    if (moving || (this.shimmer && !still.matches)) this.begin();
  }

  move(time) {
    // Step towards the targets; return whether any pane is still moving.
    const left = still.matches ? 0 : Math.exp((this.before - time) / SETTLING);
    this.before = time;
    let moving = false;
    for (const [name, values] of Object.entries(this.current))
      for (let i = 0; i < values.length; i++) {
        const aim = this.target[name][i];
        if (values[i] === aim) continue;
        if (left && time - this.since < this.delay[i]) moving = true;
        else {
          values[i] = aim + (values[i] - aim) * left;
          if (Math.abs(values[i] - aim) < 0.004) values[i] = aim;
          else moving = true;
        }
      }
    return moving;
  }

  draw(time) {
    const { canvas, context, rows, columns, current } = this;
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height)
      Object.assign(canvas, { width, height });
    context.clearRect(0, 0, width, height);
    for (let i = 0; i < this.count; i++) {
      const column = i % columns, row = (i - column) / columns;
      const x = this.edge(column, columns, width), y = this.edge(row, rows, height);
      const wide = this.edge(column + 1, columns, width) - x;
      const high = this.edge(row + 1, rows, height) - y;
      const fill = (color, alpha) => {
        if (alpha < 0.004) return;
        context.fillStyle = "rgb(" + color + " / " + alpha + ")";
        context.fillRect(x, y, wide, high);
      };
      if (current.tint[i]) {
        fill(this.colors[i].map(Math.round).join(" "), current.tint[i]);
        const wave = still.matches ? 0.5 : 0.5 + 0.5 * Math.sin(time / 300 + this.phase[i]);
        fill("255 255 255", 0.2 * wave * current.tint[i]);
        this.bevel(x, y, wide, high, current.tint[i]);
      }
      fill(NIGHT, current.dark[i]);
      fill(GOLD, current.gold[i]);
    }
    if (current.lead[0]) this.leading(width, height, current.lead[0], scale);
  }

  edge(number, count, size) {
    // Where a pane begins, in pixels; the first and the last reach to the frame.
    if (number === 0 || number === count) return number && size;
    return Math.round(((number - this.lag) * size) / count);
  }

  bevel(x, y, wide, high, alpha) {
    // Light on the upper left edge, shadow on the lower right one.
    const { context } = this, edge = Math.max(1, Math.min(wide, high) / 9);
    context.fillStyle = "rgb(255 255 255 / " + 0.28 * alpha + ")";
    context.fillRect(x, y, wide, edge);
    context.fillRect(x, y, edge, high);
    context.fillStyle = "rgb(0 0 0 / " + 0.22 * alpha + ")";
    context.fillRect(x, y + high - edge, wide, edge);
    context.fillRect(x + wide - edge, y, edge, high);
  }

  leading(width, height, alpha, scale) {
    // The lead between panes, thinner where there are many.
    const { context, rows, columns } = this;
    const pane = Math.min(width / columns, height / rows);
    context.strokeStyle = "rgb(" + LEAD + " / " + alpha + ")";
    context.lineWidth = Math.max(0.75, Math.min(3 * scale, pane / 14));
    context.beginPath();
    for (let column = 0; column <= columns; column++) {
      const x = this.edge(column, columns, width);
      context.moveTo(x, 0);
      context.lineTo(x, height);
    }
    for (let row = 0; row <= rows; row++) {
      const y = this.edge(row, rows, height);
      context.moveTo(0, y);
      context.lineTo(width, y);
    }
    context.stroke();
  }
}

function shading(values, shade) {
  // Targets that clear the panes where values are large.
  const least = Math.min(...values), span = Math.max(...values) - least || 1;
  const root = Float32Array.from(values, (v) => Math.sqrt((v - least) / span)); // makes small values visible
  return { dark: root.map((v) => shade * (1 - v)), gold: root.map((v) => 0.16 * shade * v * v) };
}

function jewelColors(count) {
  return Array.from({ length: count }, (_, i) => JEWELS[(i * 7 + (i >> 2)) % JEWELS.length]);
}

// --- The rose window ---

const SVG = "http://www.w3.org/2000/svg";

function svg(kind, attributes) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const at = (radius, turn) => // a place on a circle; turns begin at the top
  (radius * Math.sin(2 * Math.PI * turn)).toFixed(2) + " " +
  (-radius * Math.cos(2 * Math.PI * turn)).toFixed(2);

function pane(inner, outer, from, to) {
  return "M" + at(inner, from) + "L" + at(outer, from) + "A" + outer + " " + outer + " 0 0 1 " +
    at(outer, to) + "L" + at(inner, to) + "A" + inner + " " + inner + " 0 0 0 " + at(inner, from);
}

function petal(inner, outer, turn, half) {
  // A petal with its tip outwards.
  const middle = inner + 0.62 * (outer - inner);
  return "M" + at(inner, turn) + "Q" + at(middle, turn - half) + " " + at(outer, turn) +
    "Q" + at(middle, turn + half) + " " + at(inner, turn);
}

function rose(window, petals = 12) {
  // Petals around a center, a ring of circles, and a rim, drawn from the rim inwards.
  const [ruby, cobalt, emerald, amber, violet] = JEWELS.map((color) => "rgb(" + color + ")");
  const add = (kind, color, attributes) => {
    const made = svg(kind, { ...attributes, fill: color, class: "pane" });
    made.style.animationDelay = -12 * Math.random() + "s";
    window.append(made);
  };
  window.append(svg("circle", { r: 99, class: "stone" }));
  for (let i = 0; i < 3 * petals; i++)
    add("path", [cobalt, ruby, violet][i % 3],
      { d: pane(84, 96, i / (3 * petals), (i + 1) / (3 * petals)) });
  for (let i = 0; i < petals; i++) {
    add("path", i % 2 ? cobalt : violet, { d: pane(50, 83, (i - 0.5) / petals, (i + 0.5) / petals) });
    const [cx, cy] = at(72, i / petals).split(" ");
    add("circle", i % 2 ? amber : ruby, { cx, cy, r: 9.5 });
  }
  for (let i = 0; i < petals; i++)
    add("path", i % 2 ? emerald : cobalt, { d: pane(15, 61, (i - 0.5) / petals, (i + 0.5) / petals) });
  for (let i = 0; i < petals; i++)
    add("path", i % 2 ? amber : ruby, { d: petal(16, 60, i / petals, 0.075) });
  add("circle", amber, { r: 15 });
  add("circle", "rgb(255 226 150)", { r: 8 });
  const sun = svg("radialGradient", { id: "sun" });
  sun.append(svg("stop", { "stop-color": "#fff", "stop-opacity": 0.95 }),
    svg("stop", { offset: 1, "stop-color": "#fff", "stop-opacity": 0 }));
  if (!find("sun")) window.append(sun, svg("circle", { r: 97, class: "sun" }));
}
