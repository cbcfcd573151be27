// Files to images that are uploaded and drawn. In exported pages, the worker uses it as well.

const THUMBNAIL = 144;
const JPEG_QUALITY = 0.92;
const MAX_DECODING = 20; // seconds
const MAX_SEGMENTS = 1000; // before the pixels of a JPEG
const DRAWN = 512; // pixels of the longer side of images that the page keeps to draw

async function decodeBitmap(blob, options) {
  // Upright; undefined if it takes too long. Decoders cannot be stopped, and Chromium's takes
  // minutes for a JPEG of very many segments.
  const head = new Uint8Array(await blob.slice(0, 2 ** 20).arrayBuffer());
  if (head[0] === 0xff && head[1] === 0xd8)
    for (let at = 2, count = 1; head[at] === 0xff && head[at + 1] !== 0xda; count++) {
      if (count > MAX_SEGMENTS) throw new Error("too many segments");
      while (head[at + 1] === 0xff) at += 1; // padding
      at += 2 + 256 * head[at + 2] + head[at + 3];
    }
  return Promise.race([createImageBitmap(blob, { imageOrientation: "from-image", ...options }),
    new Promise((late) => setTimeout(late, 1000 * MAX_DECODING))]);
}

async function prepareFile(file, mostBytes, largest = MAX_SIZE) {
  // What is uploaded, what is drawn (null if the browser cannot), and a note on changes.
  const bitmap = await decodeBitmap(file).catch(() => null);
  if (!bitmap) return { blob: file, image: null, note: "" }; // the server may know the format
  const { width, height } = bitmap, longer = Math.max(width, height);
  const image = toCanvas(bitmap, Math.min(1, DRAWN / longer));
  if (longer <= largest && file.size <= mostBytes) {
    bitmap.close();
    return { blob: file, image, note: "" };
  }
  const sent = toCanvas(bitmap, Math.min(1, largest / longer));
  bitmap.close();
  const blob = await new Promise((done) => sent.toBlob(done, "image/jpeg", JPEG_QUALITY));
  const note = longer <= largest ? "recompressed" : "scaled from " + width + " × " + height + " to " +
    sent.width + " × " + sent.height + " pixels";
  return { blob, image, note: note + " before sending" };
}

function toCanvas(image, scale) {
  // The image on a canvas, upright, with transparency on white.
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function thumbnail(image) {
  return toCanvas(image, Math.min(1, THUMBNAIL / Math.max(image.width, image.height)));
}

function colorsOf(image, rows, columns, box) {
  // The mean color of each patch, slightly saturated: [red, green, blue], 0 to 255.
  const [top, left, height, width] = box;
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, columns, rows);
  context.drawImage(image, left * image.width, top * image.height, width * image.width,
    height * image.height, 0, 0, columns, rows);
  const { data } = context.getImageData(0, 0, columns, rows);
  return Array.from({ length: rows * columns }, (_, patch) => {
    const color = [...data.subarray(4 * patch, 4 * patch + 3)];
    const gray = (color[0] + color[1] + color[2]) / 3;
    return color.map((part) => Math.max(0, Math.min(255, gray + 1.7 * (part - gray))));
  });
}

function imageFiles(transfer) {
  // The image files of a drop or a paste; an image dragged from another page is a file only if the
  // browser makes it one.
  return [...(transfer?.files ?? [])].filter(
    (file) => file.type.startsWith("image/") || /\.(tiff?|avif|hei[cf]|webp)$/i.test(file.name));
}
