// Adds images and requests their predictions.

function add(files, { truth = null } = {}) {
  const taken = files.slice(0, MOST - now.pictures.length);
  find("notice").textContent = taken.length === files.length ? "" : taken.length + " of " +
    files.length + " taken: " + MOST + " at a time. For whole folders there is vitrail predict.";
  const fresh = taken.map((file) => ({ file, truth, name: file.name || "picture", url: "",
    thumbnail: null, image: null, note: "", ...UNASKED() }));
  now.pictures.push(...fresh);
  if (fresh.length) choose(fresh[0]);
  for (const picture of fresh) work(picture);
}

const UNASKED = () => ({ state: "asking", answer: null, words: "", attention: null, maps: {} });

async function work(picture) {
  // From a file to a prediction; every step is shown.
  const round = now.round;
  const waiting = (words) => { picture.words = words; show(picture); };
  try {
    await met;
    await inTurn(async () => {
      if (!picture.blob) await prepare(picture);
      const query = now.about?.multi_label ? { top: TOP_OF_MANY } : { top: TOP, threshold: THRESHOLD };
      const found = await told("predict", { query, body: picture.blob, waiting });
      if (round !== now.round) return; // another model was chosen meanwhile
      const [answer] = found.answers;
      if (answer.error) throw new Trouble("That cannot be read: " + answer.error, true);
      Object.assign(picture, { state: "answered", answer, seconds: found.seconds,
        engine: found.engine, words: "" });
    });
  } catch (error) {
    if (round !== now.round) return;
    failed(picture, error);
  }
  show(picture);
  if (picture === now.chosen && picture.state === "answered") lookAt(picture);
}

function failed(picture, error) {
  if (!(error instanceof Trouble)) console.error(error);
  const words = error instanceof Trouble ? error.message : "Something went wrong in this page.";
  Object.assign(picture, { state: "failed", words, final: Boolean(error.final) });
}

async function prepare(picture) {
  const limit = now.about?.limits?.bytes ?? USUAL_LIMIT;
  const { blob, image, note } = await readied(picture.file, limit);
  Object.assign(picture, { blob, image, note, url: image ? URL.createObjectURL(blob) : "" });
  if (image) picture.thumbnail = thumbnail(image);
  show(picture, true);
}

function again() {
  // Predict all images again after the model has changed.
  now.round += 1;
  for (const picture of now.pictures) {
    Object.values(picture.maps).forEach((map) => URL.revokeObjectURL(map.url));
    Object.assign(picture, UNASKED());
    work(picture);
  }
  if (now.chosen) choose(now.chosen);
}

function clear() {
  now.round += 1;
  for (const picture of now.pictures) {
    URL.revokeObjectURL(picture.url);
    Object.values(picture.maps).forEach((map) => URL.revokeObjectURL(map.url));
    picture.image?.close();
  }
  Object.assign(now, { pictures: [], chosen: null, label: null });
  choose(null);
  find("choose").focus();
}
