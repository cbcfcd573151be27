// Image files to normalized values, with the rounding of data/transforms.py and torch's kernels.

const MAX_PIXELS = 64 * 2 ** 20, MAX_ASPECT = 100; // as in Python
const FILTERS = { // support, and the value at a distance >= 0
  bilinear: [1, (d) => 1 - d],
  bicubic: [2, (d) => cubic(d, -0.5)],
  lanczos: [3, (d) => sinc(d) * sinc(d / 3)],
};
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const cubic = (d, a) => d < 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 :
  ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;

class ImageError extends Error {} // its message is shown

async function decode(blob) {
  // Upright RGBA pixels without color management; transparency is composited on white.
  let bitmap;
  try {
    bitmap = await decodeBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new ImageError("it is damaged, or of a format that this browser does not know.");
  }
  if (!bitmap) throw new ImageError("decoding takes longer than " + MAX_DECODING + " seconds.");
  const { width, height } = bitmap;
  try {
    if (width * height > MAX_PIXELS)
      throw new ImageError(width + " × " + height + " pixels are too many; make it smaller.");
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, width, height);
  } finally {
    bitmap.close();
  }
}

function preprocess({ data, width, height }, config, channels) {
  // Normalized values (channels, rows, columns), and the visible part as fractions of the image.
  let [rows, columns] = config.resize_to ?? config.size;
  if (config.resize === "short-side") {
    const pixels = rows * columns;
    [rows, columns] = [Math.max(rows, Math.floor((height * columns) / width)),
      Math.max(columns, Math.floor((width * rows) / height))];
    if (rows * columns > MAX_ASPECT * pixels)
      throw new ImageError("its aspect ratio is more than a factor of " + MAX_ASPECT +
        " from that of the model's input.");
  }
  const [high, wide] = config.size;
  const top = cropStart(rows, high), left = cropStart(columns, wide);
  let planes = Array.from({ length: channels }, (_, channel) =>
    plane(data, channels === 1 ? -1 : channel));
  planes = planes.map((x) => resizeRows(x, height, width, columns, left, wide, config));
  planes = planes.map((x) => transpose(x, height, wide));
  planes = planes.map((x) => resizeRows(x, wide, height, rows, top, high, config, true));
  planes = planes.map((x) => transpose(x, wide, high));
  const values = new Float32Array(channels * high * wide);
  planes.forEach((x, channel) => {
    const scale = Math.fround(1 / Math.fround(255 * Math.fround(config.std[channel])));
    const shift = Math.fround(Math.fround(config.mean[channel]) / Math.fround(config.std[channel]));
    const start = channel * high * wide;
    for (let i = 0; i < x.length; i++) values[start + i] = Math.fround(x[i] * scale) - shift;
  });
  const part = [high / rows, wide / columns];
  const box = [(1 - part[0]) / 2, (1 - part[1]) / 2, ...part];
  return { values, box };
}

function plane(data, channel) {
  // One channel of RGBA pixels, or their luminance (ITU-R 601) as Pillow rounds it.
  const out = new Uint8Array(data.length / 4);
  if (channel >= 0) for (let i = 0; i < out.length; i++) out[i] = data[4 * i + channel];
  else
    for (let i = 0; i < out.length; i++)
      out[i] = (19595 * data[4 * i] + 38470 * data[4 * i + 1] + 7471 * data[4 * i + 2] + 32768) >> 16;
  return out;
}

const cropStart = (length, size) => length < size ?
  -Math.floor((size - length) / 2) : roundToEven((length - size) / 2);

function roundToEven(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (low % 2) : Math.round(x);
}

function transpose(x, rows, columns) {
  const out = new x.constructor(x.length);
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) out[j * rows + i] = x[i * columns + j];
  return out;
}

function resizeRows(x, rows, old, length, start, count, { interpolation, antialias }, last) {
  // Resize each row of (rows, old) to `length`; return `count` of its values from `start` on, with
  // black outside. torch's antialiasing kernel for bytes has integer weights and rounds both axes.
  const exact = antialias && interpolation in FILTERS;
  const out = exact || last || old === length ?
    new Uint8ClampedArray(rows * count) : new Float32Array(rows * count);
  const { taps, shift } = old === length ? { taps: null } : exact ?
    integerTaps(old, length, interpolation) : { taps: floatTaps(old, length, interpolation) };
  for (let row = 0; row < rows; row++)
    for (let place = 0; place < count; place++) {
      const position = start + place;
      if (position < 0 || position >= length) continue;
      let sum = exact && taps ? 1 << (shift - 1) : 0;
      if (!taps) sum = x[row * old + position];
      else {
        const { first, weights } = taps[position], from = row * old + first;
        for (let j = 0; j < weights.length; j++) sum += x[from + j] * weights[j];
        if (exact) sum >>= shift;
      }
      out[row * count + place] = last && !exact ? roundToEven(sum) : sum;
    }
  return out;
}

function integerTaps(old, length, filter) {
  const [support, value] = FILTERS[filter], ratio = old / length;
  const reach = support * Math.max(1, ratio);
  let largest = 0;
  const taps = Array.from({ length }, (_, position) => {
    const center = ratio * (position + 0.5);
    const first = Math.max(0, Math.trunc(center - reach + 0.5));
    const count = Math.min(old, Math.trunc(center + reach + 0.5)) - first;
    let weights = Array.from({ length: count }, (_, j) => {
      const distance = Math.abs((first + j - center + 0.5) * (1 / Math.max(1, ratio)));
      return distance < support ? value(distance) : 0;
    });
    const sum = weights.reduce((a, b) => a + b, 0);
    weights = weights.map((weight) => weight / sum);
    largest = Math.max(largest, ...weights);
    return { first, weights };
  });
  let shift = 0; // as many bits as fit 16
  while (shift < 22 && Math.trunc(0.5 + largest * 2 ** (shift + 1)) < 2 ** 15) shift += 1;
  for (const tap of taps)
    tap.weights = Int32Array.from(tap.weights, (w) => Math.trunc(w * 2 ** shift + (w < 0 ? -0.5 : 0.5)));
  return { taps, shift };
}

function floatTaps(old, length, filter) {
  // Without antialiasing; "area" is the mean of all pixels that the new one covers.
  const ratio = Math.fround(old / length);
  return Array.from({ length }, (_, position) => {
    if (filter === "area") {
      const first = Math.floor((position * old) / length);
      const count = Math.ceil(((position + 1) * old) / length) - first;
      return { first, weights: Array(count).fill(1 / count) };
    }
    if (filter === "nearest")
      return { first: Math.min(old - 1, Math.floor(Math.fround(ratio * (position + 0.5)))), weights: [1] };
    const center = Math.fround(Math.fround(ratio * (position + 0.5)) - 0.5), low = Math.floor(center);
    const offsets = filter === "bilinear" ? [0, 1] : [-1, 0, 1, 2];
    const places = offsets.map((offset) => Math.min(old - 1, Math.max(0, low + offset)));
    const first = places[0], weights = Array(places.at(-1) - first + 1).fill(0);
    offsets.forEach((offset, i) => {
      const distance = Math.abs(center - low - offset);
      weights[places[i] - first] += filter === "bilinear" ? 1 - distance : cubic(distance, -0.75);
    });
    return { first, weights };
  });
}
