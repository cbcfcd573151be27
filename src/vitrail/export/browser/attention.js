// Where the tokens that the head reads attend, as `attention` in serving/registry.py returns it.

function attentionOf(engine, { grid, prefix, heads, depth, pool, classTokens, lag }, box) {
  const tokens = prefix + grid[0] * grid[1];
  const weights = new Float64Array(tokens); // of each token in the head's input
  if (pool === "map") {
    const { values } = engine.tensor("pool"), patches = grid[0] * grid[1];
    values.forEach((value, i) => (weights[prefix + (i % patches)] += (value * patches) / values.length));
  } else if (pool === "cls") weights.fill(1 / classTokens, 0, classTokens);
  else weights.fill(1 / (tokens - prefix), prefix);
  const maps = [], peaks = [];
  let rollout = weights; // multiplied by each layer's attention, from the last to the first
  for (let layer = depth - 1; layer >= 0; layer--) {
    const { values } = engine.tensor("layer " + layer), rows = values.length / heads / tokens;
    const own = Array.from({ length: heads }, () => new Float64Array(tokens));
    const before = new Float64Array(tokens);
    for (let row = 0; row < rows; row++) {
      if (!weights[row] && !rollout[row]) continue;
      before[row] += rollout[row] / 2; // the residual connection; rows of attention sum to 1
      for (let head = 0; head < heads; head++)
        for (let i = 0, from = (head * rows + row) * tokens; i < tokens; i++) {
          own[head][i] += weights[row] * values[from + i];
          before[i] += (rollout[row] * values[from + i]) / heads / 2;
        }
    }
    rollout = before;
    maps.unshift(own.map((map) => map.subarray(prefix)));
    peaks.unshift(maps[0].map((map) => Math.max(...map)));
  }
  const bytes = (map) => toBytes(map, Math.max(...map));
  return { grid, layers: depth, heads, box, lag, peaks,
    maps: base64(maps.flat().map(bytes)), rollout: base64([bytes(rollout.subarray(prefix))]) };
}

const toBytes = (values, largest) =>
  Uint8Array.from(values, (value) => Math.round((255 * value) / (largest || 1)));

function base64(parts) {
  let text = "";
  for (const part of parts) for (const value of part) text += String.fromCharCode(value);
  return btoa(text);
}
