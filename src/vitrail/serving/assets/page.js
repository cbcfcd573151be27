// Model info, examples, teaching, and event handlers.

async function meet() {
  // Load the model info.
  try {
    const [about, { models }] = await Promise.all([told("model"), told("models")]);
    now.about = about;
    showModels(models);
    showAbout(about);
    if (!now.chosen) introduce();
    findExamples();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    say("Nobody is there", error.message);
    find("again").hidden = false;
  }
}

function showModels(names) {
  const select = find("models").querySelector("select");
  find("models").hidden = names.length < 2;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  select.value = now.about.name;
}

function introduce() {
  // Before the first image: the classes of the model.
  const classes = now.about?.classes ?? [], more = classes.length - NAMED;
  const names = more > 1 ? [...classes.slice(0, NAMED), more.toLocaleString("en") + " more"] : classes;
  if (!classes.length) return say("", "");
  say(classes.length === 1 ? "It knows one class" :
    "It knows " + classes.length.toLocaleString("en") + " classes", listed(names) +
    ". Whatever you show it, " + (now.about.multi_label ? "it says which of them apply." :
      "it names the nearest of them."));
}

function showAbout({ architecture, parameters, image_size: size, teach }) {
  const millions = parameters / 1e6;
  const told = [architecture,
    parameters && (millions < 10 ? millions.toFixed(1) : Math.round(millions)) + " M parameters",
    size && "sees " + size.join(" × ") + " pixels"];
  find("about").textContent = told.filter(Boolean).join(" · ");
  now.layer = -1;
  now.grid = null;
  find("teach").hidden = !teach;
  find("method").replaceChildren(...ofClasses().map((name) => make("option", {}, name)));
  find("looking").classList.toggle("one-method", ofClasses().length < 2);
  find("looking").querySelector("[value=class]").parentElement.hidden = !asksClasses();
}

async function findExamples(tries = 3) {
  // Optional: errors are not shown. The server finds examples during warm-up, so retry.
  const model = now.model;
  try {
    const examples = await told("examples");
    if (model !== now.model) return;
    showExamples(examples);
    if (!examples.length && tries > 1) setTimeout(() => findExamples(tries - 1), 2000);
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
  }
}

function showExamples(examples) {
  const row = find("examples").querySelector(".row");
  find("examples").hidden = examples.length === 0;
  row.replaceChildren();
  for (const { id, label } of examples) {
    const button = make("button", { type: "button", title: label ?? "" },
      make("i"), make("span", {}, label ?? ""));
    row.append(button);
    fetchExample(button, id, label);
  }
}

async function fetchExample(button, id, label) {
  // Fetched by the script, because an image element would not send the token.
  try {
    const response = await inTurn(() => talk("examples/" + encodeURIComponent(id)));
    const blob = await whole(response, "blob");
    const file = new File([blob], label || "example", { type: blob.type });
    const image = await createImageBitmap(blob);
    button.firstChild.replaceWith(thumbnail(image));
    button.onclick = () => {
      const known = now.pictures.find((picture) => picture.file === file);
      known ? choose(known) : add([file], { truth: label });
      window.scrollTo({ top: 0 });
    };
  } catch {
    button.remove(); // a row of pictures to try is not worth a sentence
  }
}

async function learn(event) {
  event.preventDefault();
  const name = find("lesson").value.trim(), files = [...find("lessons").files];
  const button = find("teach").querySelector("button");
  const say = (words) => (find("learned").textContent = words);
  button.disabled = true;
  say("Learning …");
  try {
    const body = new FormData();
    for (const file of files) {
      const limit = (now.about.limits?.bytes ?? USUAL_LIMIT) / files.length;
      const { blob } = await readied(file, limit, LESSON);
      body.append("pictures", blob, "picture"); // names stay here
    }
    const found = await told("teach", { query: { name }, body, waiting: say });
    now.about = await told("model");
    showAbout(now.about);
    const unread = found.errors.length ? found.errors.length + " could not be read" : "";
    const notes = [...found.notes, unread].filter(Boolean).map((note) => " (" + note + ")");
    say("It knows " + called(name) + " now. Show it one!" + notes.join(""));
    event.target.reset();
    again();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    say(error.message);
  } finally {
    button.disabled = false;
  }
}

// --- Event handlers ---

find("empty").onclick = find("choose").onclick = () => find("files").click();
find("photograph").onclick = () => find("camera").click();
find("clear").onclick = clear;
for (const id of ["files", "camera"])
  find(id).onchange = ({ target }) => { add([...target.files]); target.value = ""; };
find("again").onclick = () => {
  find("again").hidden = true;
  if (!now.about) met = meet();
  if (!now.chosen) return say("", "");
  Object.assign(now.chosen, UNASKED());
  choose(now.chosen);
  work(now.chosen);
};
find("models").querySelector("select").onchange = async ({ target }) => {
  now.model = target.value;
  await (met = meet());
  again();
};
find("looking").onsubmit = (event) => event.preventDefault();
find("looking").oninput = ({ target }) => {
  if (target.name === "view") setView(target.value);
  if (target.id === "layer") now.layer = target.value - 1;
  if (target.id === "head") now.head = target.value - 1;
  now.told += 1;
  slid();
  if (target.value === "class" && now.label === null)
    return explain(now.chosen.answer.guesses[0].label);
  if (target.id === "method") { const label = now.label; now.label = null; return explain(label); }
  show(now.chosen);
};
find("teach").querySelector("form").onsubmit = learn;

document.onpaste = (event) => {
  const files = pictureFiles(event.clipboardData);
  if (files.length) { event.preventDefault(); add(files); }
};
document.ondragover = (event) => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dropping");
};
document.ondragleave = (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
};
document.ondrop = (event) => {
  document.body.classList.remove("dropping");
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  const files = pictureFiles(event.dataTransfer);
  if (files.length) add(files);
  else say("That is no picture", "Drop a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF.");
};

find("photograph").hidden = !navigator.maxTouchPoints;
find("hint").hidden = Boolean(navigator.maxTouchPoints);
rose(find("rose"));
rose(document.querySelector(".mark"), 6);
setView("picture");
slid();
choose(null);
let met = meet(); // a promise: pictures may come before the server has told what it is
