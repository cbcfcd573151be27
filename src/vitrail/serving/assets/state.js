// Page state, formatting, and requests.

const find = (id) => document.getElementById(id);
const MAX_UPLOADS = 50; // images at a time
const MAX_REQUESTS = 3; // concurrent requests
const SURE = 0.95, THRESHOLD = 0.6; // confident above; undecided below
const CLOSE = 0.15; // difference of probabilities below which two classes are reported together
const TOP = 5, TOP_OF_MANY = 20; // classes shown; for multi-label models
const GENERAL = ["rollout", "last layer"]; // methods that are not specific to a class
const DEFAULT_LIMIT = 20 * 2 ** 20; // bytes, if the server does not state it
const MIN_COVERED = 0.6; // seconds that a new image stays covered, at least
const FLASH = 1.6; // seconds for which the attention is shown first
const MAX_NAMED = 12; // classes that are listed by name before there is an image

const app = {
  model: undefined, about: null, uploads: [], chosen: null, round: 0,
  view: "picture", layer: 0, head: -1, // -1: all heads
  label: null, grid: null, animation: 0,
};
const overlay = new PatchOverlay(find("overlay"));

function make(kind, attributes = {}, ...inside) {
  const made = Object.assign(document.createElement(kind), attributes);
  made.append(...inside);
  return made;
}

function percent(part) {
  if (part > 0.999 && part < 1) return "> 99.9 %";
  if (part > 0 && part < 0.001) return "< 0.1 %";
  return (100 * part).toFixed(part >= 0.995 || part < 0.1 ? 1 : 0).replace(/^100\.0$/, "100") + " %";
}

const joinNames = (names) => names.length < 2 ? names.join("") :
  names.slice(0, -1).join(", ") + " and " + names.at(-1);
const duration = (seconds) => seconds < 1 ?
  Math.max(1, Math.round(1000 * seconds)) + " ms" : seconds.toFixed(1) + " s";
const quoted = (name) => "“" + name + "”";

// --- The server ---

let tokenAsked = null; // one dialog for all requests that wait for it

function askToken(refused) {
  tokenAsked ??= new Promise((done) => {
    const dialog = find("token"), form = dialog.querySelector("form");
    find("refused").textContent = refused ? "That token was not accepted." : "";
    form.onsubmit = (event) => {
      event.preventDefault(); // the token goes into headers only
      done(form.querySelector("input").value.trim());
      dialog.close();
    };
    form.querySelector("[value=leave]").onclick = () => dialog.close();
    dialog.onclose = () => { tokenAsked = null; form.reset(); done(null); };
    dialog.showModal();
  });
  return tokenAsked;
}

const request = (path, more = {}) =>
  fetchWithRetry(path, { ...more, askToken, query: { model: app.model, ...more.query } });
const requestJson = async (path, more) => readBody(await request(path, more), "json");

function limitConcurrency(count) {
  // Limit the number of concurrent jobs.
  let free = count;
  const queue = [];
  const next = () => { free += 1; queue.shift()?.(); };
  return async (job) => {
    while (free < 1) await new Promise((turn) => queue.push(turn));
    free -= 1;
    try { return await job(); } finally { next(); }
  };
}
const limitRequests = limitConcurrency(MAX_REQUESTS);
const serialize = limitConcurrency(1); // the server handles these one at a time
