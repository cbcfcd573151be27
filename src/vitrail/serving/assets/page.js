// Model info, examples, teaching, and event handlers.

async function loadModel() {
  // Load the model info.
  try {
    const [about, { models }] = await Promise.all([requestJson("model"), requestJson("models")]);
    app.about = about;
    showModels(models);
    showAbout(about);
    if (!app.chosen) showClasses();
    findExamples();
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
    setStatus(UNREACHABLE, error.message);
    find("again").hidden = false;
  }
}

function showModels(names) {
  const select = find("models").querySelector("select");
  find("models").hidden = names.length < 2;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  select.value = app.about.name;
}

function showClasses() {
  // Before the first image: the classes of the model.
  const classes = app.about?.classes ?? [], more = classes.length - MAX_NAMED;
  const names = more > 1 ? [...classes.slice(0, MAX_NAMED), more.toLocaleString("en") + " more"] : classes;
  if (!classes.length) {
    if (!app.about?.teach) return setStatus("", "");
    find("teach").open = true;
    return setStatus("No classes yet", "Add two or more below, from a few images of each.");
  }
  setStatus(classes.length === 1 ? "1 class" :
    classes.length.toLocaleString("en") + " classes", joinNames(names) +
    (app.about.multi_label ? ". Any number of them may apply to an image." :
      ". Every image is assigned to one of them."));
}

function showAbout({ name, architecture, parameters, image_size: size, teach }) {
  const millions = parameters / 1e6;
  const parts = [...new Set([name, architecture]),
    parameters && (millions < 10 ? millions.toFixed(1) : Math.round(millions)) + " M parameters",
    size && size.join(" × ") + " pixels"];
  find("about").textContent = parts.filter(Boolean).join(" · ");
  app.layer = -1;
  app.grid = null;
  find("teach").hidden = !teach;
  find("method").replaceChildren(...classMethods().map((name) => make("option", {}, name)));
  find("looking").classList.toggle("one-method", classMethods().length < 2);
  find("looking").querySelector("[value=class]").parentElement.hidden = !hasClassMethods();
}

async function findExamples(tries = 3) {
  // Optional: errors are not shown. The server finds examples during warm-up, so retry.
  const model = app.model;
  try {
    const examples = await requestJson("examples");
    if (model !== app.model) return;
    showExamples(examples);
    if (!examples.length && tries > 1) setTimeout(() => findExamples(tries - 1), 2000);
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
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
    const response = await limitRequests(() => request("examples/" + encodeURIComponent(id)));
    const blob = await readBody(response, "blob");
    const file = new File([blob], label || "example", { type: blob.type });
    const image = await createImageBitmap(blob);
    button.firstChild.replaceWith(thumbnail(image));
    button.onclick = () => {
      const known = app.uploads.find((upload) => upload.file === file);
      known ? select(known) : add([file], { truth: label });
      window.scrollTo({ top: 0 });
    };
  } catch {
    button.remove(); // examples are optional
  }
}

async function teach(event) {
  event.preventDefault();
  const name = find("lesson").value.trim(), files = [...find("lessons").files];
  const button = find("teach").querySelector("button");
  const setStatus = (message) => (find("learned").textContent = message);
  button.disabled = true;
  setStatus("Learning …");
  try {
    const body = new FormData();
    for (const file of files) {
      const limit = (app.about.limits?.bytes ?? DEFAULT_LIMIT) / files.length;
      const { blob } = await prepareFile(file, limit, TEACH_SIZE);
      body.append("pictures", blob, "picture"); // names stay here
    }
    const response = await requestJson("teach", { query: { name }, body, onDelay: setStatus });
    app.about = await requestJson("model");
    showAbout(app.about);
    if (!app.chosen) showClasses();
    const unread = response.errors.length ? response.errors.length + " could not be read" : "";
    const notes = [...response.notes, unread].filter(Boolean).map((note) => " (" + note + ")");
    setStatus("Added " + quoted(name) + "." + notes.join(""));
    event.target.reset();
    predictAgain();
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
    setStatus(error.message);
  } finally {
    button.disabled = false;
  }
}

async function photograph() {
  // Phones have an app for it; elsewhere the camera is shown in a dialog.
  if (touch) return find("camera").click();
  const dialog = find("viewfinder"), video = dialog.querySelector("video");
  const [take, leave] = dialog.querySelectorAll("button");
  find("notice").textContent = "";
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1280 } } });
  } catch (error) {
    find("notice").textContent = "The camera cannot be used: " + error.message + ".";
    return;
  }
  dialog.onclose = () => video.srcObject.getTracks().forEach((track) => track.stop());
  leave.onclick = () => dialog.close();
  take.onclick = async () => {
    const image = await createImageBitmap(video);
    const blob = await new Promise((done) => toCanvas(image, 1).toBlob(done, "image/jpeg", JPEG_QUALITY));
    dialog.close();
    add([new File([blob], "photo.jpg", { type: blob.type })]);
  };
  dialog.showModal();
}

// --- Event handlers ---

const touch = navigator.maxTouchPoints > 0;

find("empty").onclick = find("choose").onclick = () => find("files").click();
find("photograph").onclick = photograph;
find("clear").onclick = clear;
for (const id of ["files", "camera"])
  find(id).onchange = ({ target }) => { add([...target.files]); target.value = ""; };
find("again").onclick = () => {
  find("again").hidden = true;
  if (!app.about) modelLoaded = loadModel();
  if (!app.chosen) return setStatus("", "");
  Object.assign(app.chosen, PENDING());
  select(app.chosen);
  predict(app.chosen);
};
find("models").querySelector("select").onchange = async ({ target }) => {
  app.model = target.value;
  await (modelLoaded = loadModel());
  predictAgain();
};
find("looking").onsubmit = (event) => event.preventDefault();
find("looking").oninput = ({ target }) => {
  if (target.name === "view") setView(target.value);
  if (target.id === "layer") app.layer = target.value - 1;
  if (target.id === "head") app.head = target.value - 1;
  app.animation += 1;
  updateSliders();
  if (target.value === "class" && app.label === null)
    return explain(app.chosen.answer.guesses[0].label);
  if (target.id === "method") { const label = app.label; app.label = null; return explain(label); }
  show(app.chosen);
};
find("teach").querySelector("form").onsubmit = teach;

document.onpaste = (event) => {
  const files = imageFiles(event.clipboardData);
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
  const files = imageFiles(event.dataTransfer);
  if (files.length) add(files);
  else setStatus("Not an image", "Drop a " + FORMATS + ".");
};

find("photograph").hidden = !touch && !navigator.mediaDevices?.getUserMedia; // HTTPS or localhost only
find("hint").hidden = touch;
rose(find("rose"));
rose(document.querySelector(".mark"), 6);
setView("picture");
updateSliders();
select(null);
let modelLoaded = loadModel(); // a promise: images may be added before it resolves
