// Adds images and requests their predictions.

function add(files, { truth = null } = {}) {
  const taken = files.slice(0, MAX_UPLOADS - app.uploads.length);
  find("notice").textContent = taken.length === files.length ? "" : taken.length + " of " +
    files.length + " added: " + MAX_UPLOADS + " at a time. Use vitrail predict for folders.";
  const fresh = taken.map((file) => ({ file, truth, name: file.name || "image", url: "",
    thumbnail: null, image: null, note: "", ...PENDING() }));
  app.uploads.push(...fresh);
  if (fresh.length) select(fresh[0]);
  for (const upload of fresh) predict(upload);
}

const PENDING = () => ({ state: "asking", answer: null, message: "", attention: null, maps: {} });

async function predict(upload) {
  // From a file to a prediction; every step is shown.
  const round = app.round;
  const onDelay = (message) => { upload.message = message; show(upload); };
  try {
    await modelLoaded;
    await limitRequests(async () => {
      if (!upload.blob) await prepare(upload);
      if (!upload.image && UNDRAWN) throw new UserError(UNDRAWN, true);
      if (app.about?.teach && !app.about.classes.length)
        throw new UserError("There are no classes yet; add two below.", true);
      const query = app.about?.multi_label ? { top: TOP_OF_MANY } : { top: TOP };
      if (!app.about?.multi_label && !app.about?.conformal) query.threshold = THRESHOLD;
      const response = await requestJson("predict", { query, body: upload.blob, onDelay });
      if (round !== app.round) return; // another model was chosen meanwhile
      const [answer] = response.answers;
      if (answer.error) throw new UserError("The image cannot be read: " + answer.error, true);
      Object.assign(upload, { state: "answered", answer, seconds: response.seconds,
        engine: response.engine, warning: response.warning, message: "" });
    });
  } catch (error) {
    if (round !== app.round) return;
    markFailed(upload, error);
  }
  show(upload);
  if (upload === app.chosen && upload.state === "answered") loadAttention(upload);
}

function markFailed(upload, error) {
  if (!(error instanceof UserError)) console.error(error);
  const message = error instanceof UserError ? error.message : "Something went wrong on this page.";
  Object.assign(upload, { state: "failed", message, final: Boolean(error.final) });
}

async function prepare(upload) {
  const limit = app.about?.limits?.bytes ?? DEFAULT_LIMIT;
  const { blob, image, note } = await prepareFile(upload.file, limit);
  Object.assign(upload, { blob, image, note, url: image ? URL.createObjectURL(blob) : "" });
  if (image) upload.thumbnail = thumbnail(image);
  show(upload, true);
}

function predictAgain() {
  // Predict all images again after the model has changed.
  app.round += 1;
  for (const upload of app.uploads) {
    Object.values(upload.maps).forEach((map) => URL.revokeObjectURL(map.url));
    Object.assign(upload, PENDING());
    predict(upload);
  }
  if (app.chosen) select(app.chosen);
}

function clear() {
  app.round += 1;
  for (const upload of app.uploads) {
    URL.revokeObjectURL(upload.url);
    Object.values(upload.maps).forEach((map) => URL.revokeObjectURL(map.url));
  }
  Object.assign(app, { uploads: [], chosen: null, label: null });
  select(null);
  find("choose").focus();
}
