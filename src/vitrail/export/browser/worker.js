// Runs the model in a worker thread. The page calls the functions of `commands` by name.

const state = { engine: null, about: null, memory: null, head: null, attention: new Map() };
const MAX_MAPS = 50; // images whose attention is kept

const commands = {
  async load({ wasm, weights, about, taught }) {
    Object.assign(state, { about, memory: taught.memory, head: taught.head });
    state.engine = await Engine.create(wasm, weights, about.program);
    const { logits, features } = state.engine.run(checkInput(about));
    const values = [...(logits ?? []), ...features];
    const error = Math.max(...values.map((value, i) => Math.abs(value - about.check[i])));
    if (!(error <= 1e-3 * Math.max(...about.check.map(Math.abs))))
      throw new ImageError("The outputs in this browser differ from the model's; try another browser.");
  },

  async predict({ blob, key }) {
    // Logits of the model, or of the head that was taught here.
    const { values, box } = preprocess(await decode(blob), state.about.preprocessing, state.about.channels);
    const { logits, features } = state.engine.run(values);
    if (state.about.view && key !== undefined) {
      state.attention.set(key, attentionOf(state.engine, state.about.view, box));
      if (state.attention.size > MAX_MAPS) state.attention.delete(state.attention.keys().next().value);
    }
    const { head } = state;
    if (!head) return logits ?? [];
    return Float64Array.from(head.bias, (bias, c) => bias + dot(head.weight[c], features));
  },

  async attention({ blob, key }) {
    if (!state.attention.has(key)) await commands.predict({ blob, key });
    return state.attention.get(key);
  },

  async teach({ name, blobs }) {
    const rows = [], errors = [];
    for (const blob of blobs)
      try {
        const image = preprocess(await decode(blob), state.about.preprocessing, state.about.channels);
        rows.push(state.engine.run(image.values).features);
      } catch (error) {
        if (!(error instanceof ImageError)) throw error;
        errors.push(error.message);
      }
    if (!rows.length) throw new ImageError("None of the images can be read.");
    state.memory = addClass(state.memory ?? emptyMemory(rows[0].length, state.about.backbone), name, rows);
    let accuracy = null, balanced = null;
    if (state.memory.classes.length > 1)
      ({ memory: state.memory, head: state.head, accuracy, balanced } = fitHead(state.memory));
    return { classes: state.memory.classes, accuracy, balanced, errors };
  },

  taught: () => ({ memory: state.memory, head: state.head }),
  preprocess: async ({ blob }) => // for tests
    preprocess(await decode(blob), state.about.preprocessing, state.about.channels).values,
  fit: ({ memory }) => fitHead(memory), // for tests
};

function checkInput({ program }) {
  const count = program.tensors.images.slice(1).reduce((a, b) => a * b, 1);
  return Float32Array.from({ length: count }, (_, i) => ((i * 7919) % 2003) / 1001.5 - 1);
}

let last = Promise.resolve(); // one command at a time
self.onmessage = ({ data: { id, name, argument } }) => {
  last = last.then(async () => {
    try {
      self.postMessage({ id, result: await commands[name](argument) });
    } catch (error) {
      const known = error instanceof ImageError;
      self.postMessage({ id, error: known ? error.message : String(error), known });
    }
  });
};
