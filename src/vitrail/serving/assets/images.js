// Files to images that are uploaded and drawn.

const THUMBNAIL = 144;
const JPEG_QUALITY = 0.92;
const MAX_DECODING = 20; // seconds
const DRAWN = 512; // pixels of the longer side of images that the page keeps to draw

async function prepareFile(file, mostBytes, largest = MAX_SIZE) {
  // What is uploaded, what is drawn (null if the browser cannot), and a note on changes.
  const decoding = createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => null);
  const bitmap = await Promise.race([decoding, pause(MAX_DECODING)]); // it cannot be stopped
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
  // The mean color of each pane, slightly saturated: [red, green, blue], 0 to 255.
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
  return Array.from({ length: rows * columns }, (_, pane) => {
    const color = [...data.subarray(4 * pane, 4 * pane + 3)];
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
