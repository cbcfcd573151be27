// The model: a list of calls of WebAssembly kernels, made by export/kernel_program.py.

class Engine {
  static async create(wasm, weights, program) {
    const engine = new Engine();
    engine.program = program;
    engine.memory = new WebAssembly.Memory({ initial: Math.ceil(program.memory / 65536) });
    const { instance } = await WebAssembly.instantiate(wasm, { env: { memory: engine.memory } });
    engine.calls = program.calls.map(([name, ...rest]) => [instance.exports[name], rest]);
    engine.readWeights(weights);
    return engine;
  }

  readWeights(weights) {
    const half = halfToFloat(), { buffer } = weights;
    for (const [address, count, type, position, [columns]] of this.program.constants) {
      const out = new Float32Array(this.memory.buffer, address, count);
      if (type === "f32") out.set(new Float32Array(buffer, position, count));
      else if (type === "f16") {
        const bits = new Uint16Array(buffer, position, count);
        for (let i = 0; i < count; i++) out[i] = half[bits[i]];
      } else { // int8 (rows, columns), then a scale for each column
        const levels = new Int8Array(buffer, position, count);
        const scales = new Float32Array(buffer, position + 4 * Math.ceil(count / 4), columns);
        for (let i = 0; i < count; i++) out[i] = levels[i] * scales[i % columns];
      }
    }
  }

  tensor(name) {
    // A view of the input, an output or an attention map: its values and its shape.
    const [address, ...shape] = this.program.tensors[name];
    const count = shape.reduce((a, b) => a * b, 1);
    return { values: new Float32Array(this.memory.buffer, address, count), shape };
  }

  run(images) {
    this.tensor("images").values.set(images);
    for (const [kernel, rest] of this.calls) kernel(...rest);
    const outputs = {};
    for (const name of ["logits", "features"])
      if (this.program.tensors[name]) outputs[name] = this.tensor(name).values.slice();
    return outputs;
  }
}

function halfToFloat() {
  // The value of each of the 65,536 float16 numbers.
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const exponent = (i >> 10) & 31, fraction = i & 1023;
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    table[i] = i & 0x8000 ? -size : size;
  }
  return table;
}
