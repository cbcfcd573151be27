// Requests to the server, with retries and error messages.

const TIMEOUT_MS = 120_000; // per request
const MAX_TRIES = 5; // while the server is busy
const MAX_WAIT = 30; // seconds between them
const TOKEN = "vitrail token";
const MAX_SIZE = 2048; // pixels of the longer side that are sent; models see far fewer
const TEACH_SIZE = 1024; // of images to teach with, which are sent together
const UNDRAWN = ""; // the error for images that the browser cannot draw: servers know more formats
const FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF";
const UNREACHABLE = "Server not reachable"; // headline

class UserError extends Error {
  // Its message is shown to the user. `final`: retrying would not help.
  constructor(message, final = false) {
    super(message);
    this.final = final;
  }
}

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

function storedToken(token) {
  // Get or set the token of this tab. Without browser storage it is requested again.
  try {
    if (token !== undefined) sessionStorage.setItem(TOKEN, token);
    return sessionStorage.getItem(TOKEN);
  } catch {
    return (storedToken.here = token ?? storedToken.here ?? null);
  }
}

const MESSAGES = {
  400: (why) => why,
  403: (why) => why,
  404: (why) => why,
  408: (why) => "The upload was too slow: " + why,
  413: (why) => "Too large for this server: " + why,
  415: (why) => "Unsupported file type: " + why,
  422: (why) => "The image cannot be read: " + why,
  503: (why) => "The server is overloaded: " + why,
  504: (why) => "The model took too long: " + why,
};

function errorText(status, why) {
  const known = MESSAGES[status];
  return known ? known(why) : "The server returned status " + status + (why ? ": " + why : "");
}

async function fetchWithRetry(path, { query = {}, body, askToken, onDelay = () => {} } = {}) {
  // Return the response, or throw UserError. `onDelay` is called on delays.
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const address = path + (given.length ? "?" + new URLSearchParams(given) : "");
  for (let tries = 1; ; ) {
    const used = storedToken();
    const headers = used ? { Authorization: "Bearer " + used } : {};
    if (body instanceof Blob && !body.type) headers["Content-Type"] = "application/octet-stream";
    const response = await fetchOnce(address, { method: body ? "POST" : "GET", body, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      const token = storedToken() === used ? await askToken(Boolean(used)) : storedToken(); // asked meanwhile?
      if (token === null) throw new UserError("This server requires a token.");
      storedToken(token);
    } else if (response.status === 503 && tries < MAX_TRIES) {
      const seconds = Math.min(MAX_WAIT, Number(response.headers.get("Retry-After")) || tries);
      onDelay("The server is busy; retrying in " + Math.ceil(seconds) + " s.");
      await pause(seconds);
      tries += 1;
    } else {
      const final = response.status < 500 && response.status !== 408; // 408: the upload was too slow
      throw new UserError(errorText(response.status, await reason(response)), final);
    }
  }
}

async function fetchOnce(address, request) {
  try {
    return await fetch(address, { ...request, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    if (error.name === "TimeoutError")
      throw new UserError("No response for " + TIMEOUT_MS / 1000 + " seconds; the server may be stuck.");
    throw new UserError("The server does not respond. Is it still running?");
  }
}

async function readBody(response, kind) {
  // Read the body as "json" or "blob".
  try {
    return await response[kind]();
  } catch {
    throw new UserError("The response was interrupted; try again.");
  }
}

async function reason(response) {
  try {
    return (await response.json()).error ?? "";
  } catch {
    return "";
  }
}
