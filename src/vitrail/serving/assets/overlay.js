// The animated overlay of the image, one cell per patch, and the ornament of the empty page.

const still = matchMedia("(prefers-reduced-motion: reduce)");
const PALETTE = [[176, 24, 60], [28, 78, 168], [12, 120, 84], [222, 150, 24], [108, 52, 160]];
const LINE = "24 20 18"; // color of the grid lines
const DARK = "10 8 22"; // color over a patch with little attention
const BRIGHT = "255 200 84"; // color over a patch with much attention
const DECAY = 130; // time constant of the animation in milliseconds

class PatchOverlay {
  // Every cell has three opacities: `tint` (its own color), `dark` and `bright`; `lines` is that of the
  // grid. `animateTo` sets targets with a delay for each cell. Reduced motion skips the animation.
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.pending = 0;
    this.reset(1, 1, [[0, 0, 0]]);
    new ResizeObserver(() => this.begin()).observe(canvas);
  }

  reset(rows, columns, colors, lag = 0) {
    // New, clear cells; the receptive fields of their patches are `lag` cells up and to the left.
    const count = rows * columns;
    Object.assign(this, { rows, columns, colors, count, lag, shimmer: false });
    this.current = { tint: new Float32Array(count), dark: new Float32Array(count),
      bright: new Float32Array(count), lines: new Float32Array(1) };
    this.phase = Float32Array.from({ length: count }, () => 7 * Math.random());
    this.animateTo({});
  }

  animateTo({ tint, dark, bright, lines = 0, delay, shimmer = false }) {
    // Targets that are omitted become clear. Delays are milliseconds from now, one for each cell.
    const clear = new Float32Array(this.count);
    this.target = { tint: tint ?? clear, dark: dark ?? clear, bright: bright ?? clear, lines: [lines] };
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
    // Step towards the targets; return whether any cell is still moving.
    const left = still.matches ? 0 : Math.exp((this.before - time) / DECAY);
    this.before = time;
    let moving = false;
    for (const [name, values] of Object.entries(this.current))
      for (let i = 0; i < values.length; i++) {
        const target = this.target[name][i];
        if (values[i] === target) continue;
        if (left && time - this.since < this.delay[i]) moving = true;
        else {
          values[i] = target + (values[i] - target) * left;
          if (Math.abs(values[i] - target) < 0.004) values[i] = target;
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
      fill(DARK, current.dark[i]);
      fill(BRIGHT, current.bright[i]);
    }
    if (current.lines[0]) this.grid(width, height, current.lines[0], scale);
  }

  edge(number, count, size) {
    // Where a cell begins, in pixels; the first and the last reach to the frame.
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

  grid(width, height, alpha, scale) {
    // The lines between cells, thinner where there are many.
    const { context, rows, columns } = this;
    const cell = Math.min(width / columns, height / rows);
    context.strokeStyle = "rgb(" + LINE + " / " + alpha + ")";
    context.lineWidth = Math.max(0.75, Math.min(3 * scale, cell / 14));
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

function attentionTargets(values, shade) {
  // Targets that clear the cells where values are large.
  const least = Math.min(...values), span = Math.max(...values) - least || 1;
  const root = Float32Array.from(values, (v) => Math.sqrt((v - least) / span)); // makes small values visible
  return { dark: root.map((v) => shade * (1 - v)), bright: root.map((v) => 0.16 * shade * v * v) };
}

function paletteColors(count) {
  return Array.from({ length: count }, (_, i) => PALETTE[(i * 7 + (i >> 2)) % PALETTE.length]);
}

// --- The ornament: a rose window ---

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
  const [ruby, cobalt, emerald, amber, violet] = PALETTE.map((color) => "rgb(" + color + ")");
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
