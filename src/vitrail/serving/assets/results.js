// Shows an image and its prediction.

function select(upload) {
  app.chosen = upload;
  app.label = null;
  if (app.view === "class") setView("picture");
  find("empty").hidden = Boolean(upload);
  find("stage").hidden = !upload;
  find("clear").hidden = !upload;
  document.body.classList.toggle("bare", !upload);
  if (!upload) showClasses();
  show(upload, true);
  if (upload?.state === "answered") loadAttention(upload);
}

function setStatus(headline, sentence) {
  // Set only on change: screen readers announce every assignment.
  for (const [id, message] of Object.entries({ headline, sentence }))
    if (find(id).textContent !== message) find(id).textContent = message;
}

function show(upload, changed = false) {
  // Update everything that depends on the image; `changed` if another one is selected.
  showStrip();
  if (upload !== app.chosen) return;
  if (changed) showUpload(upload);
  showAnswer(upload);
  showView(upload);
}

function showStrip() {
  const strip = find("strip");
  strip.hidden = app.uploads.length < 2;
  const buttons = app.uploads.map((upload) => {
    upload.button ??= make("button", { type: "button", onclick: () => select(upload) });
    const message = upload.state === "failed" ? "!" : upload.answer ? verdict(upload).short : "…";
    upload.button.setAttribute("aria-pressed", upload === app.chosen);
    upload.button.title = upload.name;
    upload.button.replaceChildren(upload.thumbnail ?? make("i"), make("span", {}, message));
    return upload.button;
  });
  const same = buttons.length === strip.children.length;
  if (!same || buttons[0] !== strip.firstChild) strip.replaceChildren(...buttons); // or focus is lost
}

function showUpload(upload) {
  const cast = find("cast").getContext("2d");
  cast.clearRect(0, 0, 32, 32);
  if (!upload) return;
  const { image } = upload, [wide, high] = image ? [image.width, image.height] : [1, 1];
  Object.assign(find("picture"), { src: upload.url || BLANK, alt: upload.name });
  Object.assign(find("cast"), { width: 32, height: 32 });
  if (image) cast.drawImage(image, 0, 0, 32, 32);
  find("lit").hidden = true;
  find("frame").style.aspectRatio = wide + " / " + high;
  find("frame").style.width = "min(100%, var(--tall) * " + wide / high + "rem)";
  layOutCells(upload);
}

const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==";

function layOutCells(upload) {
  // One cell per patch; before the grid is known, about eight along the shorter side.
  const { image, attention } = upload;
  const box = attention?.box ?? [0, 0, 1, 1];
  const ratio = image ? image.width / image.height : 1;
  const guess = [8 * Math.max(1, 1 / ratio), 8 * Math.max(1, ratio)].map(Math.round);
  const [rows, columns] = attention?.grid ?? app.grid ?? guess;
  const colors = image ? colorsOf(image, rows, columns, box) : paletteColors(rows * columns);
  const [top, left, height, width] = box.map((part) => 100 * part + "%");
  Object.assign(find("overlay").style, { top, left, height, width });
  overlay.reset(rows, columns, colors, attention?.lag);
  if (upload.state !== "asking") return;
  upload.coveredAt = performance.now();
  overlay.current.tint.fill(1);
  overlay.current.lines[0] = 1;
  animateTo(upload, { tint: overlay.current.tint.slice(), lines: 1, shimmer: true });
}

function animateTo(upload, light) {
  // An image that the browser cannot draw stays covered.
  const tint = new Float32Array(overlay.count).fill(1);
  overlay.animateTo(upload.image ? light : { tint, lines: 1, ...light });
}

function verdict({ answer }) {
  // Summarize the prediction: a headline, a sentence, and a word for the strip.
  const [first, second] = answer.guesses, several = app.about?.multi_label;
  if (several && answer.labels.length)
    return { short: joinNames(answer.labels), headline: joinNames(answer.labels),
      sentence: answer.labels.length > 1 ? "These apply." : "This applies." };
  if (several)
    return { short: "none", headline: "No class",
      sentence: "None reaches the threshold; the most probable is " + quoted(first.label) + "." };
  const close = second && first.probability - second.probability < CLOSE;
  if (close && first.probability + second.probability > THRESHOLD)
    return { short: first.label + "?", headline: first.label + " or " + second.label + "?",
      sentence: "The two are about equally probable." };
  if (!answer.labels.length)
    return { short: "?", headline: "Not sure",
      sentence: "Most probable: " + quoted(first.label) + ", with low confidence." };
  if (first.probability < SURE)
    return { short: first.label, headline: "Probably " + first.label,
      sentence: "Moderate confidence." };
  return { short: first.label, headline: first.label, sentence: "High confidence." };
}

function showAnswer(upload) {
  const answered = upload?.state === "answered";
  find("again").hidden = upload?.state !== "failed" || upload.final;
  find("guesses").hidden = !answered;
  find("looking").hidden = !answered || !hasMaps();
  find("facts").textContent = find("drift").textContent = "";
  if (!upload) return;
  if (upload.state === "failed") return setStatus("Request failed", upload.message);
  if (!answered) return setStatus("Classifying …", upload.message);
  const { headline, sentence } = verdict(upload);
  setStatus(headline, sentence + predictionSet(upload.answer) + labeled(upload));
  showGuesses(upload);
  const facts = [duration(upload.seconds), "engine " + upload.engine, upload.note];
  find("facts").textContent = facts.filter(Boolean).join(" · ");
  find("drift").textContent = upload.warning ? "Warning: " + upload.warning + "." : "";
}

function predictionSet({ prediction_set: set }) {
  // Of a calibrated model.
  const rate = app.about?.conformal?.error_rate;
  return rate && set?.length > 1 ? " Prediction set: " + joinNames(set) + " (error rate " + percent(rate) + ")." : "";
}

function labeled({ truth, answer }) {
  // For an example: whether the prediction matches its label.
  if (!truth) return "";
  return answer.labels.includes(truth) ? " Correct." : " Its label is " + quoted(truth) + ".";
}

function showGuesses(upload) {
  const { guesses, labels } = upload.answer;
  if (upload.rows !== upload.answer) { // new bars grow from zero
    upload.rows = upload.answer;
    upload.list = guesses.map(({ label, probability }) => {
      const bar = make("i"), percentage = make("span", { className: "amount" }, percent(probability));
      const button = make("button", { type: "button", onclick: () => explain(label) },
        make("span", { className: "name" }, label), percentage, make("span", { className: "bar" }, bar));
      button.disabled = !hasClassMethods();
      requestAnimationFrame(() => (bar.style.width = 100 * probability + "%"));
      return make("li", { className: labels.includes(label) ? "decided" : "" }, button);
    });
  }
  upload.list.forEach((item, place) => item.firstChild.setAttribute("aria-pressed",
    app.view === "class" && guesses[place].label === app.label));
  const list = find("guesses");
  if (list.firstChild !== upload.list[0]) list.replaceChildren(...upload.list);
}
