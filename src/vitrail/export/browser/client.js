// Replaces serving/assets/api.js: the worker answers the requests of the page.

const MAX_SIZE = Infinity, TEACH_SIZE = Infinity; // pixels: images are not sent anywhere
const FORMATS = "JPEG, PNG, WebP, GIF, BMP or AVIF";
const UNDRAWN = "The image cannot be read: it is damaged, or not a " + FORMATS + ".";
const UNREACHABLE = "The model cannot run"; // headline
const source = "<!doctype html>\n" + document.documentElement.outerHTML; // before any change
const embedded = (id) => document.getElementById(id).textContent;
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

class UserError extends Error {
  // Its message is shown to the user. `final`: retrying would not help.
  constructor(message, final = false) {
    super(message);
    this.final = final;
  }
}

function fromBase64(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function decompress(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Memory and head of taught classes: a bundle's probe.safetensors with two more tensors.
const TYPES = { F32: Float32Array, F64: Float64Array, I64: BigInt64Array };

function readProbe(bytes) {
  if (!bytes.length) return { memory: null, head: null };
  const start = 8 + Number(new DataView(bytes.buffer).getBigUint64(0, true)), read = {};
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const { __metadata__: { "vitrail-probe": fields }, ...tensors } = header;
  for (const [name, { dtype, shape: [count, width], data_offsets: [from, to] }] of Object.entries(tensors)) {
    const values = new TYPES[dtype](bytes.slice(start + from, start + to).buffer);
    read[name] = width === undefined ? Array.from(values, Number) :
      Array.from({ length: count }, (_, i) => values.slice(i * width, (i + 1) * width));
  }
  const { weight, bias, ...memory } = read;
  return { memory: { ...JSON.parse(fields), ...memory, width: tensors.sums.shape[1] },
    head: weight ? { weight, bias } : null };
}

function writeProbe({ memory: { counts, owners, sums, rows, width, ...fields }, head }) {
  const header = { __metadata__: { "vitrail-probe": JSON.stringify(fields) } }, parts = [];
  let end = 0;
  const write = (name, dtype, values, ...shape) => {
    header[name] = { dtype, shape, data_offsets: [end, end += values.byteLength] };
    parts.push(values);
  };
  const matrix = (name, dtype, list) => {
    const values = new TYPES[dtype](list.length * width);
    list.forEach((row, i) => values.set(row, i * width));
    write(name, dtype, values, list.length, width);
  };
  write("counts", "I64", BigInt64Array.from(counts, BigInt), counts.length);
  write("owners", "I64", BigInt64Array.from(owners, BigInt), owners.length);
  matrix("sums", "F64", sums);
  if (head) {
    matrix("weight", "F64", head.weight);
    write("bias", "F64", Float64Array.from(head.bias), head.bias.length);
  }
  matrix("rows", "F32", rows);
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padding = new Uint8Array(-text.length & 7).fill(32); // so that tensors are aligned
  return [BigInt64Array.of(BigInt(text.length + padding.length)), text, padding, ...parts];
}

// --- The worker ---

const about = JSON.parse(embedded("model")), stored = readProbe(fromBase64(embedded("taught")));
const useClasses = (classes) => Object.assign(about, { classes, conformal: null });
if (stored.head) useClasses(stored.memory.classes);
const worker = new Worker(URL.createObjectURL(new Blob([embedded("worker")], { type: "text/javascript" })));
const waiting = new Map();
let calls = 0;
worker.onmessage = ({ data: { id, result, error, known } }) => {
  const [done, failed] = waiting.get(id);
  waiting.delete(id);
  if (error === undefined) done(result);
  else failed(known ? new UserError(error, true) : new Error(error));
};
const run = (name, argument) => new Promise((done, failed) => {
  waiting.set((calls += 1), [done, failed]);
  worker.postMessage({ id: calls, name, argument });
});
const loaded = (async () => {
  const wasm = fromBase64(embedded("kernels"));
  const weights = await decompress(fromBase64(embedded("weights")));
  await run("load", { wasm, weights, about, taught: stored });
})();

const keys = new WeakMap(); // of images whose attention the worker keeps
let images = 0;
function keyOf(blob) {
  if (!keys.has(blob)) keys.set(blob, (images += 1));
  return keys.get(blob);
}

function probabilitiesOf(logits) {
  if (about.multi_label) return Array.from(logits, (x) => 1 / (1 + Math.exp(-x)));
  const largest = Math.max(...logits), odds = Array.from(logits, (x) => Math.exp(x - largest));
  const sum = odds.reduce((a, b) => a + b, 0);
  return odds.map((value) => value / sum);
}

async function classify(blob, key) {
  // All classes, most probable first.
  await loaded;
  if (!about.classes.length) throw new UserError("There are no classes yet; add two below.");
  const logits = await run("predict", { blob, key });
  const guesses = probabilitiesOf(logits).map((probability, index) =>
    ({ label: about.classes[index], probability, index }));
  return guesses.sort((a, b) => b.probability - a.probability);
}

function conformalSet(guesses) {
  // The prediction set of a calibrated model, as in evaluation/conformal.py.
  const { method, thresholds } = about.conformal;
  let sum = 0;
  return guesses.filter(({ probability, index }, rank) => {
    sum += probability;
    const score = method === "lac" ? 1 - probability : sum + (method === "raps" ? 0.1 * rank : 0);
    return rank === 0 || score <= (thresholds[index] ?? thresholds[0]);
  }).map(({ label }) => label);
}

function labelsOf(guesses, threshold) {
  // Several if multi-label; none below the threshold, which a calibration may have found.
  const [{ index }] = guesses, abstain = about.conformal?.abstain ?? [];
  const least = abstain[index] ?? abstain[0] ?? threshold ?? (about.multi_label ? 0.5 : 0);
  const labels = guesses.filter(({ probability }) => probability >= least).map(({ label }) => label);
  return about.multi_label ? labels : labels.slice(0, 1);
}

const ANSWERS = {
  model: () => about,
  models: () => ({ models: [about.name] }),
  examples: () => about.examples.map(({ label }, id) => ({ id, label })),
  async predict({ top, threshold }, blob) {
    const start = performance.now();
    let guesses;
    try {
      guesses = await classify(blob, keyOf(blob));
    } catch (error) {
      if (!error.final) throw error;
      throw new UserError("The image cannot be read: " + error.message, true);
    }
    const answer = { guesses: guesses.slice(0, top), labels: labelsOf(guesses, threshold) };
    if (about.conformal) answer.prediction_set = conformalSet(guesses);
    return { answers: [answer], seconds: (performance.now() - start) / 1000, engine: "WebAssembly" };
  },
  attention: (_, blob) => run("attention", { blob, key: keyOf(blob) }),
  async teach({ name }, body) {
    const blobs = body.getAll("pictures");
    const { classes, accuracy, balanced, errors } = await run("teach", { name, blobs });
    const notes = accuracy === null ? [] : ["leave-one-out accuracy " + percent(accuracy) +
      (Math.abs(balanced - accuracy) < 1e-9 ? "" : ", balanced " + percent(balanced))];
    if (classes.length < 2) notes.push("add a second class to classify images");
    else useClasses(classes);
    find("keep").hidden = classes.length < 2;
    find("batch").hidden = !about.classes.length;
    return { notes, errors };
  },
};

async function fetchWithRetry(path, { query = {}, body } = {}) {
  // The name and the result of the function in api.js, for the files that follow.
  await loaded;
  const [name, id] = path.split("/");
  if (id !== undefined) {
    const bytes = fromBase64(about.examples[id].data);
    return { blob: async () => new Blob([bytes], { type: "image/jpeg" }) };
  }
  const answer = await ANSWERS[name](query, body);
  return { json: async () => answer };
}

const readBody = (response, kind) => response[kind]();
