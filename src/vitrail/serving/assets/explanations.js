// Attention maps and class explanations.

const hasMaps = () => (app.about?.methods ?? []).length > 0;
const classMethods = () => (app.about?.methods ?? []).filter((name) => !GENERAL.includes(name));
const hasClassMethods = () => classMethods().length > 0;

async function loadAttention(upload) {
  // Fetch the attention maps and reveal the image through them once.
  if (!hasMaps()) return animateTo(upload, {});
  const round = app.round;
  if (!upload.attention) {
    try {
      const response = await serialize(() => upload === app.chosen &&
        requestJson("attention", { body: upload.blob }));
      if (!response || round !== app.round) return;
      upload.attention = unpack(response);
      app.grid = upload.attention.grid;
    } catch (error) {
      if (round !== app.round || upload !== app.chosen) return;
      find("explained").textContent = error.message;
      return animateTo(upload, {});
    }
    if (upload !== app.chosen) return;
    setSliders(upload.attention);
    if (app.view !== "class") reveal(upload);
  } else {
    setSliders(upload.attention);
    showView(upload);
  }
}

async function reveal(upload) {
  // Lay out one cell per patch, and clear them in the order of attention.
  const mine = (app.animation += 1), interrupted = () => mine !== app.animation || upload !== app.chosen;
  const covered = overlay.shimmer && upload.image && !still.matches;
  if (covered) await pause(Math.max(0, MIN_COVERED - (performance.now() - upload.coveredAt) / 1000));
  if (interrupted()) return;
  layOutCells(upload);
  if (covered) {
    overlay.current.tint.fill(1);
    overlay.current.lines[0] = 1;
    const values = upload.attention.rollout;
    animateTo(upload, { ...attentionTargets(values, 0.75), lines: 0.6, delay: values.map((v) => 600 * (1 - v)) });
    await pause(FLASH);
  }
  if (!interrupted()) showView(upload);
}

function unpack({ maps, rollout, ...more }) {
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return { ...more, maps: bytes(maps),
    rollout: Float32Array.from(bytes(rollout), (value) => value / 255) };
}

function selectedMap({ grid, heads, maps, peaks }) {
  // The attention map of the selected layer and head, scaled to a maximum of 1.
  const count = grid[0] * grid[1], total = new Float32Array(count);
  const chosen = app.head < 0 ? [...Array(heads).keys()] : [app.head];
  for (const head of chosen) {
    const from = (app.layer * heads + head) * count, peak = peaks[app.layer][head];
    for (let i = 0; i < count; i++) total[i] += maps[from + i] * peak;
  }
  const most = total.reduce((a, b) => Math.max(a, b), 0) || 1;
  return total.map((value) => value / most);
}

function showView(upload) {
  // Show the selected view.
  if (upload?.state === "failed") animateTo(upload, {});
  if (upload?.state !== "answered") return;
  const shade = find("shade").value / 100, { attention } = upload;
  const map = upload.maps[app.label + " " + find("method").value];
  find("lit").hidden = app.view !== "class" || !map;
  find("frame").classList.toggle("seen", app.view === "rollout" || app.view === "layer");
  if (!find("lit").hidden) {
    if (find("lit").src !== map.url) find("lit").src = map.url;
    find("lit").alt = "evidence for " + app.label;
    find("lit").style.opacity = shade;
  }
  find("explained").textContent = captionOf(map);
  if (!attention) return;
  if (app.view === "rollout") animateTo(upload, { ...attentionTargets(attention.rollout, shade), lines: 0.6 });
  else if (app.view === "layer") animateTo(upload, { ...attentionTargets(selectedMap(attention), shade), lines: 0.6 });
  else animateTo(upload, {});
}

function captionOf(map) {
  const { layers, heads } = app.chosen.attention ?? {};
  if (app.view === "class" && app.label === null) return "Select a class above.";
  if (app.view === "class" && !map) return "Computing the evidence for " + quoted(app.label) + " …";
  if (app.view === "class")
    return map.error || "Highlighted: evidence for " + quoted(app.label) + ".";
  if (app.view === "picture") return hasClassMethods() ? "Select a class to see the evidence for it." : "";
  if (!app.chosen.attention) return "Loading the attention …";
  if (app.view === "rollout") return "Attention rollout: brighter patches contribute more to the prediction.";
  const which = app.head < 0 ? (heads > 1 ? "all " + heads + " heads" : "the head") :
    "head " + (app.head + 1);
  return "Attention of " + which + " in layer " + (app.layer + 1) + " of " + layers + ".";
}

async function explain(label) {
  // The overlay of a class, fetched once; a second click removes it.
  const upload = app.chosen, round = app.round;
  if (app.view === "class" && app.label === label) {
    setView("picture");
    return show(upload);
  }
  app.label = label;
  setView("class");
  show(upload);
  const method = find("method").value, key = label + " " + method;
  if (upload.maps[key]?.url) return;
  delete upload.maps[key];
  try {
    const response = await serialize(() => request("explain", {
      query: { method, class: label }, body: upload.blob }));
    const url = URL.createObjectURL(await readBody(response, "blob"));
    if (round === app.round) upload.maps[key] = { url };
  } catch (error) {
    if (round === app.round) upload.maps[key] = { url: BLANK, error: error.message };
  }
  if (upload === app.chosen) show(upload);
  if (upload.maps[key]?.error) delete upload.maps[key]; // so that it can be requested again
}

function setView(view) {
  app.view = view;
  app.animation += 1; // cancels a pending animation
  find("looking").elements.view.value = view;
  find("looking").dataset.view = view;
}

function setSliders({ layers, heads }) {
  find("layer").max = layers;
  find("head").max = heads;
  find("head").parentElement.classList.toggle("single", heads === 1);
  if (app.layer < 0 || app.layer >= layers) app.layer = layers - 1;
  if (app.head >= heads) app.head = -1;
  updateSliders();
}

function updateSliders() {
  find("layer").value = app.layer + 1;
  find("head").value = app.head + 1;
  const values = { layer: app.layer + 1 + " of " + find("layer").max,
    head: app.head < 0 ? "all" : app.head + 1 + " of " + find("head").max,
    shade: find("shade").value + " %" };
  for (const [id, message] of Object.entries(values)) {
    find(id).setAttribute("aria-valuetext", message);
    find(id).previousElementSibling.textContent = message;
  }
}
