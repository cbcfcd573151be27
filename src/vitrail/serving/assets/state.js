// Page state, formatting, and requests.

const find = (id) => document.getElementById(id);
const MOST = 50; // pictures at a time
const AT_ONCE = 3; // requests under way
const SURE = 0.95, THRESHOLD = 0.6; // from where it is sure; below what nothing is decided
const CLOSE = 0.15; // two classes that are no further apart are told together
const TOP = 5, TOP_OF_MANY = 20; // classes that are told; where several may apply, more
const GENERAL = ["rollout", "last layer"]; // methods that cannot be asked about a class
const USUAL_LIMIT = 20 * 2 ** 20; // bytes, if the server does not tell
const GLAZED = 0.6; // seconds that a new picture is all panes, however quick the answer
const FLASH = 1.6; // seconds in which they show where it looked
const NAMED = 12; // classes that are told by name before there is a picture

const now = {
  model: undefined, about: null, pictures: [], chosen: null, round: 0,
  view: "picture", layer: 0, head: -1, // -1: all heads
  label: null, grid: null, told: 0,
};
const glass = new Glass(find("glass"));

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

const listed = (names) => names.length < 2 ? names.join("") :
  names.slice(0, -1).join(", ") + " and " + names.at(-1);
const duration = (seconds) => seconds < 1 ?
  Math.max(1, Math.round(1000 * seconds)) + " ms" : seconds.toFixed(1) + " s";
const called = (name) => "“" + name + "”";

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

const talk = (path, more = {}) =>
  ask(path, { ...more, askToken, query: { model: now.model, ...more.query } });
const told = async (path, more) => whole(await talk(path, more), "json");

function limited(count) {
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
const inTurn = limited(AT_ONCE);
const oneByOne = limited(1); // what the server does one at a time is asked one at a time
