// Attention maps and class explanations.

const looks = () => (now.about?.methods ?? []).length > 0;
const ofClasses = () => (now.about?.methods ?? []).filter((name) => !GENERAL.includes(name));
const asksClasses = () => ofClasses().length > 0;

async function lookAt(picture) {
  // Fetch the attention maps and reveal the image through them once.
  if (!looks()) return aim(picture, {});
  const round = now.round;
  if (!picture.attention) {
    try {
      const found = await oneByOne(() => picture === now.chosen &&
        told("attention", { body: picture.blob }));
      if (!found || round !== now.round) return;
      picture.attention = unpacked(found);
      now.grid = picture.attention.grid;
    } catch (error) {
      if (round !== now.round || picture !== now.chosen) return;
      find("explained").textContent = error.message;
      return aim(picture, {});
    }
    if (picture !== now.chosen) return;
    setSliders(picture.attention);
    if (now.view !== "class") relight(picture);
  } else {
    setSliders(picture.attention);
    showLight(picture);
  }
}

async function relight(picture) {
  // Lay out one pane per patch, and clear them in the order of attention.
  const mine = (now.told += 1), interrupted = () => mine !== now.told || picture !== now.chosen;
  const glazed = glass.shimmer && picture.image && !still.matches;
  if (glazed) await pause(Math.max(0, GLAZED - (performance.now() - picture.glazed) / 1000));
  if (interrupted()) return;
  layPanes(picture);
  if (glazed) {
    glass.now.tint.fill(1);
    glass.now.lead[0] = 1;
    const values = picture.attention.rollout;
    aim(picture, { ...lightOf(values, 0.75), lead: 0.6, delay: values.map((v) => 600 * (1 - v)) });
    await pause(FLASH);
  }
  if (!interrupted()) showLight(picture);
}

function unpacked({ maps, rollout, ...more }) {
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return { ...more, maps: bytes(maps),
    rollout: Float32Array.from(bytes(rollout), (value) => value / 255) };
}

function seen({ grid, heads, maps, peaks }) {
  // The attention map of the selected layer and head, scaled to a maximum of 1.
  const count = grid[0] * grid[1], total = new Float32Array(count);
  const chosen = now.head < 0 ? [...Array(heads).keys()] : [now.head];
  for (const head of chosen) {
    const from = (now.layer * heads + head) * count, peak = peaks[now.layer][head];
    for (let i = 0; i < count; i++) total[i] += maps[from + i] * peak;
  }
  const most = total.reduce((a, b) => Math.max(a, b), 0) || 1;
  return total.map((value) => value / most);
}

function showLight(picture) {
  // Show the selected view.
  if (picture?.state === "failed") aim(picture, {});
  if (picture?.state !== "answered") return;
  const shade = find("shade").value / 100, { attention } = picture;
  const map = picture.maps[now.label + " " + find("method").value];
  find("lit").hidden = now.view !== "class" || !map;
  find("frame").classList.toggle("seen", now.view === "rollout" || now.view === "layer");
  if (!find("lit").hidden) {
    if (find("lit").src !== map.url) find("lit").src = map.url;
    find("lit").alt = "where it sees " + now.label;
    find("lit").style.opacity = shade;
  }
  find("explained").textContent = explained(map);
  if (!attention) return;
  if (now.view === "rollout") aim(picture, { ...lightOf(attention.rollout, shade), lead: 0.6 });
  else if (now.view === "layer") aim(picture, { ...lightOf(seen(attention), shade), lead: 0.6 });
  else aim(picture, {});
}

function explained(map) {
  const { layers, heads } = now.chosen.attention ?? {};
  if (now.view === "class" && now.label === null) return "Choose a class above.";
  if (now.view === "class" && !map) return "Asking what speaks for " + called(now.label) + " …";
  if (now.view === "class")
    return map.trouble || "It glows where the picture speaks for " + called(now.label) + ".";
  if (now.view === "picture") return asksClasses() ? "Choose a class to see what speaks for it." : "";
  if (!now.chosen.attention) return "Asking where it looks …";
  if (now.view === "rollout") return "Light falls through the panes that reach the answer.";
  const which = now.head < 0 ? (heads > 1 ? "its " + heads + " heads look" : "it looks") :
    "head " + (now.head + 1) + " looks";
  return "Where " + which + " in layer " + (now.layer + 1) + " of " + layers + ".";
}

async function explain(label) {
  // The overlay of a class, fetched once; a second click removes it.
  const picture = now.chosen, round = now.round;
  if (now.view === "class" && now.label === label) {
    setView("picture");
    return show(picture);
  }
  now.label = label;
  setView("class");
  show(picture);
  const method = find("method").value, key = label + " " + method;
  if (picture.maps[key]?.url) return;
  delete picture.maps[key];
  try {
    const response = await oneByOne(() => talk("explain", {
      query: { method, class: label }, body: picture.blob }));
    const url = URL.createObjectURL(await whole(response, "blob"));
    if (round === now.round) picture.maps[key] = { url };
  } catch (error) {
    if (round === now.round) picture.maps[key] = { url: BLANK, trouble: error.message };
  }
  if (picture === now.chosen) show(picture);
  if (picture.maps[key]?.trouble) delete picture.maps[key]; // so that it can be asked again
}

function setView(view) {
  now.view = view;
  now.told += 1; // what was about to change the light does so no more
  find("looking").elements.view.value = view;
  find("looking").dataset.view = view;
}

function setSliders({ layers, heads }) {
  find("layer").max = layers;
  find("head").max = heads;
  find("head").parentElement.classList.toggle("single", heads === 1);
  if (now.layer < 0 || now.layer >= layers) now.layer = layers - 1;
  if (now.head >= heads) now.head = -1;
  slid();
}

function slid() {
  find("layer").value = now.layer + 1;
  find("head").value = now.head + 1;
  const values = { layer: now.layer + 1 + " of " + find("layer").max,
    head: now.head < 0 ? "all" : now.head + 1 + " of " + find("head").max,
    shade: find("shade").value + " %" };
  for (const [id, words] of Object.entries(values)) {
    find(id).setAttribute("aria-valuetext", words);
    find(id).previousElementSibling.textContent = words;
  }
}
