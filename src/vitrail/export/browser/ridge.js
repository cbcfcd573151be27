// The head of taught classes: probing/ridge.py and `fit_head` of probing/teach.py, in float64.
//
// A memory holds the classes, their counts and sums of features, and rows R with R'R = X'X, which
// are the features of the images themselves unless there were more of them than features.

const BIAS = 100, EPSILON = 1e-5, DEFAULT_L2 = 1024, TINY = 1e-300;
const L2_GRID = Array.from({ length: 10 }, (_, i) => 4 ** (i - 1));
const SCALES = [0.5, 100], DEFAULT_SCALE = 8, UNCALIBRATED = 1;
const zeros = (count) => new Float64Array(count);
const sumOf = (values) => values.reduce((a, b) => a + b, 0);

const emptyMemory = (width, backbone) => ({ classes: [], counts: [], sums: [], rows: [], owners: [],
  width, l2: DEFAULT_L2, temperature: UNCALIBRATED, backbone });

function addClass(memory, name, features) {
  // Add a class, or replace the images of a known one.
  const known = memory.classes.indexOf(name), place = known < 0 ? memory.classes.length : known;
  const others = memory.rows.map((_, i) => i).filter((i) => memory.owners[i] !== place);
  const sum = zeros(memory.width);
  for (const row of features) row.forEach((value, i) => (sum[i] += value));
  const put = (list, item) => [...list.slice(0, place), item, ...list.slice(place + 1)];
  return { ...memory, classes: put(memory.classes, name), sums: put(memory.sums, sum),
    counts: put(memory.counts, features.length),
    rows: [...others.map((i) => memory.rows[i]), ...features],
    owners: [...others.map((i) => memory.owners[i]), ...features.map(() => place)] };
}

function fitHead(memory) {
  // The memory with the chosen l2 and temperature, the head (weight by class, bias) and the
  // leave-one-out accuracies, which are null if not all images are remembered individually.
  let { l2, temperature } = memory, accuracy = null, balanced = null;
  const total = sumOf(memory.counts), whole = memory.rows.length === total;
  const system = whole ? systemOfRows(memory) : systemOfSums(memory);
  let probe;
  if (whole) {
    const values = [...new Set([l2, ...L2_GRID])].sort((a, b) => a - b);
    const path = values.map((value) => leaveOneOut(system, memory, value));
    probe = path.reduce((best, each) => (each.cost <= best.cost ? each : best));
    ({ l2 } = probe);
    if (Math.min(...memory.counts) > 1) temperature = 1 / fitScale(probe.scores, memory.owners);
  } else probe = solve(system, l2);
  const prior = classPrior(memory.counts, probe, temperature);
  if (whole) {
    // Without a row, its class is rarer; a head that ignores counts is evaluated without that.
    const scores = new Set(memory.counts).size > 1 ? probe.scores : probe.held;
    ({ accuracy, balanced } = accuraciesOf(scores, memory, prior.map((x) => temperature * x)));
  }
  const weight = probe.weights.map((column) =>
    column.map((value, i) => value / system.std[i] / temperature));
  const bias = weight.map((row, c) => (BIAS * probe.bias[c]) / temperature -
    row.reduce((sum, value, i) => sum + value * system.mean[i], 0) - prior[c]);
  return { memory: { ...memory, l2, temperature }, head: { weight, bias }, accuracy, balanced };
}

function classPrior(counts, probe, temperature) {
  // What to subtract from the logits so that classes are equally likely: `class_prior` in teach.py.
  const calibrated = Math.min(...counts) > 1 && temperature !== UNCALIBRATED;
  const prior = counts.map((count, c) =>
    calibrated ? Math.log(count) : (BIAS * probe.bias[c]) / temperature);
  const present = prior.filter((_, c) => counts[c]), mean = sumOf(present) / present.length;
  return prior.map((value, c) => (counts[c] ? value - mean : 0));
}

function accuraciesOf(scores, { owners, counts }, prior) {
  // Leave-one-out accuracy and balanced accuracy, of scores minus the prior.
  const correct = counts.map(() => 0);
  scores.forEach((row, i) => {
    const adjusted = row.map((value, c) => value - prior[c]);
    correct[owners[i]] += adjusted.indexOf(Math.max(...adjusted)) === owners[i];
  });
  const recalls = correct.map((count, c) => count / counts[c]).filter((_, c) => counts[c]);
  return { accuracy: sumOf(correct) / scores.length, balanced: sumOf(recalls) / recalls.length };
}

function systemOfRows({ rows, owners, counts, sums, width }) {
  // Whitened features x; the matrix is x x' or, with more rows than features, x' x.
  const n = rows.length, mean = zeros(width), std = zeros(width);
  for (const sum of sums) sum.forEach((value, i) => (mean[i] += value / n));
  for (const row of rows) row.forEach((value, i) => (std[i] += (value - mean[i]) ** 2 / n));
  std.forEach((value, i) => (std[i] = Math.sqrt(value) + EPSILON));
  const x = rows.map((row) => Float64Array.from(row, (value, i) => (value - mean[i]) / std[i]));
  const targets = counts.map((_, c) => Float64Array.from(owners, (owner) => (owner === c ? 1 : -1)));
  if (n <= width) return { matrix: gram(x), right: targets, x, dual: true, mean, std, counts };
  const columns = Array.from({ length: width }, (_, i) => Float64Array.from(x, (row) => row[i]));
  const right = targets.map((y) => Float64Array.from(columns, (column) => dot(column, y)));
  return { matrix: gram(columns), right, x, dual: false, mean, std, counts };
}

function systemOfSums({ rows, counts, sums, width }) {
  const n = sumOf(counts), mean = zeros(width);
  for (const sum of sums) sum.forEach((value, i) => (mean[i] += value / n));
  const columns = Array.from({ length: width }, (_, i) => Float64Array.from(rows, (row) => row[i]));
  const matrix = gram(columns);
  matrix.forEach((row, i) => row.forEach((_, j) => (row[j] -= n * mean[i] * mean[j])));
  const std = Float64Array.from(matrix, (row, i) => Math.sqrt(Math.max(0, row[i]) / n) + EPSILON);
  matrix.forEach((row, i) => row.forEach((_, j) => (row[j] /= std[i] * std[j])));
  const right = sums.map((sum, c) => sum.map((value, i) => (2 * (value - counts[c] * mean[i])) / std[i]));
  return { matrix, right, x: null, dual: false, mean, std, counts };
}

function solve(system, l2) {
  // Weights of whitened features and of the constant, by class; `inverse` is (matrix + l2)^-1.
  const { matrix, right, x, dual, counts } = system, n = sumOf(counts);
  const inverse = invert(matrix, l2);
  const solution = right.map((y) => Float64Array.from(inverse, (row) => dot(row, y)));
  const weights = dual ? solution.map((v) => combine(x, v)) : solution;
  const bias = counts.map((count) => (BIAS * (2 * count - n)) / (BIAS ** 2 * n + l2));
  return { l2, weights, bias, inverse };
}

function leaveOneOut(system, { owners, counts }, l2) {
  // The probe with its cost, and the scores of each row under the fit without it: `held` as they
  // are, `scores` rebalanced, with the bias of the fit to all rows.
  const { matrix, x, dual } = system, n = x.length, classes = counts.length;
  const probe = solve(system, l2), constant = BIAS ** 2 * n;
  const least = l2 / (sumOf(matrix.map((row, i) => row[i])) + constant + l2);
  const every = BIAS ** 2 / (constant + l2), without = BIAS ** 2 / (constant - BIAS ** 2 + l2);
  const held = [];
  let own = 0, spread = 0, counted = 0;
  const scores = x.map((row, i) => {
    const free = dual ? l2 * probe.inverse[i][i] :
      1 - row.reduce((sum, value, j) => sum + value * dot(probe.inverse[j], row), 0);
    const freedom = Math.max(least, free - every), label = owners[i];
    const left = Float64Array.from(counts, (_, c) => {
      const target = c === label ? 1 : -1;
      return (dot(probe.weights[c], row) + BIAS * probe.bias[c] - target) / freedom + target;
    });
    held.push(left.slice());
    counts.forEach((count, c) => {
      const total = 2 * count - n;
      left[c] += every * total - without * (total + 1) + (c === label ? 2 * without : 0);
    });
    if (counts[label] < 2) return left; // the only example of its class
    const mean = sumOf(left) / classes;
    counted += 1;
    own += left[label] - mean;
    spread += left.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    return left;
  });
  const explained = Math.max(0, own) ** 2 / (spread * counted * (1 - 1 / classes)) || 0;
  const degrees = n * (counts.filter(Boolean).length - 1);
  const cost = degrees * Math.log(Math.max(1 - explained, TINY)) + Math.log(l2 / DEFAULT_L2) ** 2;
  return { ...probe, cost, scores, held };
}

function fitScale(scores, owners) {
  // The factor that makes scores calibrated logits. If every row is correct, the one with the
  // smallest margin counts as wrong.
  const labels = [...owners];
  const order = scores.map((row) => [...row.keys()].sort((a, b) => row[b] - row[a]));
  if (order.every(([first], i) => first === labels[i])) {
    const margins = scores.map((row, i) => row[order[i][0]] - row[order[i][1]]);
    const closest = margins.indexOf(Math.min(...margins));
    labels[closest] = order[closest][1];
  }
  const slope = (b) => sumOf(scores.map((row, i) => { // of the cross-entropy of b times the scores
    const largest = Math.max(...row), odds = row.map((value) => Math.exp(b * (value - largest)));
    return dot(odds, row) / sumOf(odds) - row[labels[i]];
  }));
  let low = 0.01, high = 100; // it is convex in b
  if (slope(1) === 0) low = high = 1;
  for (let i = 0; i < 80 && low < high; i++) {
    const middle = Math.sqrt(low * high);
    if (slope(middle) < 0) low = middle;
    else high = middle;
  }
  return Math.min(SCALES[1], Math.max(SCALES[0], Math.sqrt(low * high)));
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

function combine(rows, factors) {
  // The sum of the rows, each times its factor.
  const out = zeros(rows[0].length);
  rows.forEach((row, i) => { for (let j = 0; j < out.length; j++) out[j] += factors[i] * row[j]; });
  return out;
}

function gram(rows) {
  const out = rows.map(() => zeros(rows.length));
  for (let i = 0; i < rows.length; i++)
    for (let j = 0; j <= i; j++) out[i][j] = out[j][i] = dot(rows[i], rows[j]);
  return out;
}

function invert(matrix, l2) {
  // (matrix + l2)^-1 by the Cholesky decomposition L L': the rows of L^-1, then their products.
  const n = matrix.length, lower = matrix.map(() => zeros(n)), inverse = matrix.map(() => zeros(n));
  for (let i = 0; i < n; i++) {
    for (let j = 0; j <= i; j++) {
      let sum = matrix[i][j] + (i === j ? l2 : 0);
      for (let k = 0; k < j; k++) sum -= lower[i][k] * lower[j][k];
      lower[i][j] = i === j ? Math.sqrt(Math.max(sum, TINY)) : sum / lower[j][j];
    }
    const row = inverse[i];
    row[i] = 1;
    for (let k = 0; k < i; k++) for (let j = 0; j <= k; j++) row[j] -= lower[i][k] * inverse[k][j];
    for (let j = 0; j <= i; j++) row[j] /= lower[i][i];
  }
  const columns = matrix.map((_, j) => Float64Array.from(inverse, (row) => row[j]));
  return gram(columns);
}
