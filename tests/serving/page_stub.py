"""A stub server with canned responses, for the tests of the pages."""

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from PIL import Image

from vitrail.serving.app import ROUTES, build_page
from vitrail.serving.schemas import openapi_document

LAYERS, HEADS, ROWS, COLUMNS = 3, 2, 4, 5
ROLLED = 7  # the patch that rollout is brightest at
BOX, LAG = [0.0, 0.25, 1.0, 0.5], 0.4
CONFIDENT = {"sun": 0.97, "moon": 0.02, "star": 0.01}
MODEL = {"name": "sky", "architecture": "ViT-Mu/4", "classes": ["sun", "moon", "star"]}
MODEL |= {"image_size": [16, 20], "channels": 3, "parameters": 1_234_567, "engine": "torch"}
MODEL |= {"multi_label": False, "conformal": None, "teach": True, "layers": LAYERS, "heads": HEADS}
MODEL["methods"] = ["relevance", "gradient rollout", "rollout", "last layer"]
MODEL["limits"] = {"bytes": 2_000_000, "pictures": 64, "pixels": 10**7, "seconds": 30.0}
PAGES = {"/": build_page("page.html"), "/docs": build_page("docs.html")}
SPEC = openapi_document(ROUTES, token=False)
SPEC["paths"]["/model"]["get"]["parameters"][0]["description"] = "Which <b>one</b>."


def encoded_image(width=200, height=100, color=(200, 120, 40), kind="PNG", **more) -> bytes:
    """An encoded picture of one color, its right half darker."""
    image = Image.new("RGB", (width, height), color)
    image.paste(tuple(part // 2 for part in color), (width // 2, 0, width, height))
    buffer = io.BytesIO()
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def attention() -> dict:
    """Layer l, head h looks at patch 2 l + h, and a little everywhere; later heads look harder."""
    maps = np.full((LAYERS, HEADS, ROWS * COLUMNS), 20, np.uint8)
    for layer in range(LAYERS):
        for head in range(HEADS):
            maps[layer, head, 2 * layer + head] = 255
    rolled = np.full(ROWS * COLUMNS, 20, np.uint8)
    rolled[ROLLED] = 255
    return {
        "grid": [ROWS, COLUMNS],
        "layers": LAYERS,
        "heads": HEADS,
        "box": BOX,
        "lag": LAG,
        "maps": base64.b64encode(maps.tobytes()).decode(),
        "peaks": [[0.2 + 0.4 * head for head in range(HEADS)] for _ in range(LAYERS)],
        "rollout": base64.b64encode(rolled.tobytes()).decode(),
    }


class Stub(ThreadingHTTPServer):
    """Records requests and returns canned responses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.reset()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def reset(self) -> None:
        self.received = []  # method, path, query, content type, body
        self.model, self.models = dict(MODEL), ["sky"]
        self.probabilities, self.labels = dict(CONFIDENT), ["sun"]
        self.prediction_set, self.warning = [], ""
        self.errors = {}  # path -> (status, text) of the first responses
        self.token, self.delay = "", 0.0

    def requests(self, path):
        return [request for request in self.received if request[1] == path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_):
        pass

    def do_GET(self):
        stub, parts = self.server, urlsplit(self.path)
        path, query = parts.path, dict(parse_qsl(parts.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        stub.received.append((self.command, path, query, self.headers.get("Content-Type"), body))
        if path in PAGES:
            text, policy = PAGES[path]
            return self.send(200, text.encode(), "text/html; charset=utf-8", policy)
        if path == "/openapi.json":
            return self.send(200, SPEC)
        if stub.token and self.headers.get("Authorization") != f"Bearer {stub.token}":
            return self.send(401, {"error": "this server requires a token"})
        time.sleep(stub.delay if path == "/predict" else 0)
        if stub.errors.get(path):
            status, text = stub.errors[path].pop(0)
            return self.send(status, {"error": text})
        name = query.get("model", stub.models[0])
        match path:
            case "/model":
                return self.send(200, stub.model | {"name": name})
            case "/models":
                return self.send(200, {"models": stub.models})
            case "/examples":
                return self.send(200, [{"id": "0", "label": "sun"}, {"id": "1", "label": "moon"}])
            case "/examples/0" | "/examples/1":
                return self.send(200, encoded_image(), "image/png")
            case "/predict":
                guesses = [{"label": x, "probability": p} for x, p in stub.probabilities.items()]
                answer = {"name": "", "label": "", "labels": stub.labels, "error": ""}
                answer["prediction_set"] = stub.prediction_set
                header = {"model": name, "engine": "torch", "seconds": 0.012}
                header["warning"] = stub.warning
                return self.send(200, header | {"answers": [answer | {"guesses": guesses}]})
            case "/attention":
                return self.send(200, attention())
            case "/explain":
                return self.send(200, encoded_image(color=(255, 0, 0)), "image/png")
            case "/teach":
                stub.model = stub.model | {"classes": [*stub.model["classes"], query["name"]]}
                return self.send(200, {"notes": ["run by torch now"], "errors": []})
        return self.send(404, {"error": "not found"})

    do_POST = do_GET  # noqa: N815

    def send(self, status, body, kind="application/json", policy=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "0.05")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(data)
