// After serving/assets/page.js: many images to a CSV file, a copy with taught classes, installation.

const download = (parts, name, type) => {
  const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
};

// --- Many images ---

const csvField = (text) => {
  const safe = /^[=+\-@\t\r]/.test(text) ? "'" + text : text; // not a formula in a spreadsheet
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
};

async function classifyAll(files, progress) {
  const more = about.conformal ? ["prediction_set"] : [];
  const header = ["file", "label", "probability", "error", ...more, ...about.classes];
  const lines = [header.map(csvField).join(",")];
  for (const [i, file] of files.entries()) {
    progress(i);
    let fields;
    try {
      const guesses = await classify(file);
      const of = new Map(guesses.map(({ label, probability }) => [label, probability]));
      fields = [csvField(labelsOf(guesses).join("; ")), guesses[0].probability.toFixed(6), "",
        ...more.map(() => csvField(conformalSet(guesses).join("; "))), ...about.classes.map((label) => of.get(label).toFixed(6))];
    } catch (error) {
      if (!(error instanceof UserError)) throw error;
      fields = ["", "", csvField(error.message), ...[...more, ...about.classes].map(() => "")];
    }
    lines.push([csvField(file.webkitRelativePath || file.name), ...fields].join(","));
  }
  return lines.join("\n") + "\n";
}

async function runBatch({ target }) {
  const files = [...target.files], start = performance.now();
  target.disabled = true;
  try {
    const text = await classifyAll(files, (done) => {
      find("batched").textContent = done + " of " + files.length + " images …";
    });
    download([text], "predictions.csv", "text/csv");
    const seconds = (performance.now() - start) / 1000;
    find("batched").textContent = files.length + " images in " + duration(seconds) + ": predictions.csv";
  } finally {
    Object.assign(target, { disabled: false, value: "" });
  }
}

find("teach").before(make("details", { id: "batch", className: "box", hidden: !about.classes.length },
  make("summary", {}, "Many images to a CSV file"),
  make("label", {}, "Images ", make("input", { id: "many", type: "file", accept: "image/*", multiple: true, onchange: runBatch })),
  make("p", { id: "batched", className: "soft", role: "status" })));

// --- A copy with the taught classes ---

async function savePage() {
  const start = '<script type="text/plain" id="taught">';
  const from = source.indexOf(start) + start.length, to = source.indexOf("</" + "script", from);
  const bytes = new Uint8Array(await new Blob(writeProbe(await run("taught"))).arrayBuffer());
  const taught = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  download([source.slice(0, from), taught, source.slice(to)], "taught.html", "text/html");
}

async function saveProbe() {
  download(writeProbe(await run("taught")), "probe.safetensors", "application/octet-stream");
}

if (about.teach) {
  const text = stored.memory || !about.classes.length ? "" :
    "The model has no examples of its own classes: the first two that you add replace them.";
  find("teach").append(make("p", { className: "soft" }, text),
    make("div", { id: "keep", className: "bring", hidden: true },
      make("button", { type: "button", onclick: savePage }, "Download this page with its classes"),
      make("button", { type: "button", onclick: saveProbe }, "Download the head for vitrail teach")));
}

// --- Installed on a phone, if the page is served ---

if (location.protocol.startsWith("http")) {
  const icon = { src: document.querySelector("link[rel=icon]").href, sizes: "any", type: "image/svg+xml" };
  const manifest = { name: document.title, short_name: "vitrail", display: "standalone",
    start_url: location.href, scope: new URL(".", location.href).href, icons: [icon],
    background_color: "#141318", theme_color: "#141318" };
  document.head.append(make("link", { rel: "manifest",
    href: "data:application/manifest+json," + encodeURIComponent(JSON.stringify(manifest)) }));
}

window.vitrail = { loaded, classify, run }; // for scripts: vitrail.classify(blob)
