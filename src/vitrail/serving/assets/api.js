// Requests to the server, with retries and error messages.

const PATIENCE = 120_000; // milliseconds until an answer is given up
const TRIES = 5; // of a server that says it is busy
const LONGEST_WAIT = 30; // seconds between them
const TOKEN = "vitrail token";

class Trouble extends Error {
  // Its message is shown to the user. `final`: retrying would not help.
  constructor(message, final = false) {
    super(message);
    this.final = final;
  }
}

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

function kept(token) {
  // Get or set the token of this tab. Without browser storage it is requested again.
  try {
    if (token !== undefined) sessionStorage.setItem(TOKEN, token);
    return sessionStorage.getItem(TOKEN);
  } catch {
    return (kept.here = token ?? kept.here ?? null);
  }
}

const SENTENCES = {
  400: (why) => why,
  403: (why) => why,
  404: (why) => why,
  408: (why) => "The picture came too slowly: " + why,
  413: (why) => "That is more than this server takes: " + why,
  415: (why) => "The server does not know what that is: " + why,
  422: (why) => "That cannot be read: " + why,
  503: (why) => "The server is busy and stayed so: " + why,
  504: (why) => "The model took too long: " + why,
};

function sentenceOf(status, why) {
  const known = SENTENCES[status];
  return known ? known(why) : "The server answered " + status + (why ? ": " + why : "");
}

async function ask(path, { query = {}, body, askToken, waiting = () => {} } = {}) {
  // Return the response, or throw Trouble. `waiting` is called on delays.
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const address = path + (given.length ? "?" + new URLSearchParams(given) : "");
  for (let tries = 1; ; ) {
    const used = kept();
    const headers = used ? { Authorization: "Bearer " + used } : {};
    if (body instanceof Blob && !body.type) headers["Content-Type"] = "application/octet-stream";
    const response = await answered(address, { method: body ? "POST" : "GET", body, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      const token = kept() === used ? await askToken(Boolean(used)) : kept(); // asked meanwhile?
      if (token === null) throw new Trouble("Without a token this server answers nothing.");
      kept(token);
    } else if (response.status === 503 && tries < TRIES) {
      const seconds = Math.min(LONGEST_WAIT, Number(response.headers.get("Retry-After")) || tries);
      waiting("The server is busy; asking again in " + Math.ceil(seconds) + " s.");
      await pause(seconds);
      tries += 1;
    } else {
      const final = response.status < 500 && response.status !== 408; // 408: it came too slowly
      throw new Trouble(sentenceOf(response.status, await reason(response)), final);
    }
  }
}

async function answered(address, request) {
  try {
    return await fetch(address, { ...request, signal: AbortSignal.timeout(PATIENCE) });
  } catch (error) {
    if (error.name === "TimeoutError")
      throw new Trouble("No answer for " + PATIENCE / 1000 + " seconds; the server may be stuck.");
    throw new Trouble("The server does not answer. Is it still running?");
  }
}

async function whole(response, kind) {
  // Read the body as "json" or "blob".
  try {
    return await response[kind]();
  } catch {
    throw new Trouble("The answer of the server broke off; try again.");
  }
}

async function reason(response) {
  try {
    return (await response.json()).error ?? "";
  } catch {
    return "";
  }
}
