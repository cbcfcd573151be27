// Shows an image and its prediction.

function choose(picture) {
  now.chosen = picture;
  now.label = null;
  if (now.view === "class") setView("picture");
  find("empty").hidden = Boolean(picture);
  find("stage").hidden = !picture;
  find("clear").hidden = !picture;
  document.body.classList.toggle("bare", !picture);
  if (!picture) introduce();
  show(picture, true);
  if (picture?.state === "answered") lookAt(picture);
}

function say(headline, sentence) {
  // Set only on change: screen readers announce every assignment.
  for (const [id, words] of Object.entries({ headline, sentence }))
    if (find(id).textContent !== words) find(id).textContent = words;
}

function show(picture, changed = false) {
  // Update everything that depends on the image; `changed` if another one is selected.
  showStrip();
  if (picture !== now.chosen) return;
  if (changed) showPicture(picture);
  showAnswer(picture);
  showLight(picture);
}

function showStrip() {
  const strip = find("strip");
  strip.hidden = now.pictures.length < 2;
  const buttons = now.pictures.map((picture) => {
    picture.button ??= make("button", { type: "button", onclick: () => choose(picture) });
    const words = picture.state === "failed" ? "!" : picture.answer ? verdict(picture).short : "…";
    picture.button.setAttribute("aria-pressed", picture === now.chosen);
    picture.button.title = picture.name;
    picture.button.replaceChildren(picture.thumbnail ?? make("i"), make("span", {}, words));
    return picture.button;
  });
  const same = buttons.length === strip.children.length;
  if (!same || buttons[0] !== strip.firstChild) strip.replaceChildren(...buttons); // or focus is lost
}

function showPicture(picture) {
  const cast = find("cast").getContext("2d");
  cast.clearRect(0, 0, 32, 32);
  if (!picture) return;
  const { image } = picture, [wide, high] = image ? [image.width, image.height] : [1, 1];
  Object.assign(find("picture"), { src: picture.url || BLANK, alt: picture.name });
  Object.assign(find("cast"), { width: 32, height: 32 });
  if (image) cast.drawImage(image, 0, 0, 32, 32);
  find("lit").hidden = true;
  find("frame").style.aspectRatio = wide + " / " + high;
  find("frame").style.width = "min(100%, var(--tall) * " + wide / high + "rem)";
  layPanes(picture);
}

const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==";

function layPanes(picture) {
  // One pane per patch; before the grid is known, about eight along the shorter side.
  const { image, attention } = picture;
  const box = attention?.box ?? [0, 0, 1, 1];
  const ratio = image ? image.width / image.height : 1;
  const guess = [8 * Math.max(1, 1 / ratio), 8 * Math.max(1, ratio)].map(Math.round);
  const [rows, columns] = attention?.grid ?? now.grid ?? guess;
  const colors = image ? colorsOf(image, rows, columns, box) : jewelColors(rows * columns);
  const [top, left, height, width] = box.map((part) => 100 * part + "%");
  Object.assign(find("glass").style, { top, left, height, width });
  glass.lay(rows, columns, colors, attention?.lag);
  if (picture.state !== "asking") return;
  picture.glazed = performance.now();
  glass.now.tint.fill(1);
  glass.now.lead[0] = 1;
  aim(picture, { tint: glass.now.tint.slice(), lead: 1, shimmer: true });
}

function aim(picture, light) {
  // An image that the browser cannot draw stays covered.
  const tint = new Float32Array(glass.count).fill(1);
  glass.aim(picture.image ? light : { tint, lead: 1, ...light });
}

function verdict({ answer }) {
  // Summarize the prediction: a headline, a sentence, and a word for the strip.
  const [first, second] = answer.guesses, several = now.about?.multi_label;
  if (several && answer.labels.length)
    return { short: listed(answer.labels), headline: listed(answer.labels),
      sentence: answer.labels.length > 1 ? "These apply." : "This applies." };
  if (several)
    return { short: "none", headline: "None of them",
      sentence: "No class applies; the nearest is " + called(first.label) + "." };
  const close = second && first.probability - second.probability < CLOSE;
  if (close && first.probability + second.probability > THRESHOLD)
    return { short: first.label + "?", headline: first.label + " or " + second.label + "?",
      sentence: "It cannot decide between the two." };
  if (!answer.labels.length)
    return { short: "?", headline: "Not sure",
      sentence: "Nearest is " + called(first.label) + ", but that is no more than a guess." };
  if (first.probability < SURE)
    return { short: first.label, headline: "Probably " + first.label,
      sentence: "It leaves room for doubt." };
  return { short: first.label, headline: first.label, sentence: "It is sure." };
}

function showAnswer(picture) {
  const answered = picture?.state === "answered";
  find("again").hidden = picture?.state !== "failed" || picture.final;
  find("guesses").hidden = !answered;
  find("looking").hidden = !answered || !looks();
  find("facts").textContent = "";
  if (!picture) return;
  if (picture.state === "failed") return say("That did not work", picture.words);
  if (!answered) return say("Looking …", picture.words);
  const { headline, sentence } = verdict(picture);
  say(headline, sentence + labeled(picture));
  showGuesses(picture);
  const facts = [duration(picture.seconds), "engine " + picture.engine, picture.note];
  find("facts").textContent = facts.filter(Boolean).join(" · ");
}

function labeled({ truth, answer }) {
  // For an example: whether the prediction matches its label.
  if (!truth) return "";
  return answer.labels.includes(truth) ? " And it is right." : " Its label says " + called(truth) + ".";
}

function showGuesses(picture) {
  const { guesses, labels } = picture.answer;
  if (picture.rows !== picture.answer) { // new ones grow from nothing
    picture.rows = picture.answer;
    picture.list = guesses.map(({ label, probability }) => {
      const bar = make("i"), percentage = make("span", { className: "amount" }, percent(probability));
      const button = make("button", { type: "button", onclick: () => explain(label) },
        make("span", { className: "name" }, label), percentage, make("span", { className: "bar" }, bar));
      button.disabled = !asksClasses();
      requestAnimationFrame(() => (bar.style.width = 100 * probability + "%"));
      return make("li", { className: labels.includes(label) ? "decided" : "" }, button);
    });
  }
  picture.list.forEach((item, place) => item.firstChild.setAttribute("aria-pressed",
    now.view === "class" && guesses[place].label === now.label));
  const list = find("guesses");
  if (list.firstChild !== picture.list[0]) list.replaceChildren(...picture.list);
}
