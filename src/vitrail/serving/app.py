"""The application: shared state, routes, error handling, the middleware around them, the pages."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from itertools import count
from pathlib import Path
from secrets import token_hex
from string import Template
from typing import Any
from urllib.parse import quote

from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import VitrailError
from vitrail.inspection.images import load_image
from vitrail.models.vit import Model
from vitrail.prediction.predictor import Predictor
from vitrail.probing.teach import ProbeMemory
from vitrail.reports.html import csp_hash
from vitrail.serving import registry, schemas
from vitrail.serving.batching import (
    MAX_SPARES,
    Batcher,
    DecodePool,
    ImageItem,
    SingleWork,
    Work,
    run_blank,
    tune_batch_size,
)
from vitrail.serving.config import ServerConfig
from vitrail.serving.limits import (
    RECORD,
    AdmissionController,
    ApiError,
    ErrorResponse,
    RequestRecord,
    check_request,
    read_uploads,
    shutting_down,
)
from vitrail.serving.metrics import Metrics, log_event, log_request
from vitrail.serving.registry import MEDIA_TYPES, Example, ModelRegistry, ServedModel, find_examples
from vitrail.serving.schemas import ApiRoute

POLL_SECONDS = 0.25  # between checks whether a client that waits has disconnected
MAX_STUCK_THREADS = 3  # this many require a restart of the process
MAX_STUCK_TIME = 5  # times the watchdog's limit: a single thread stuck this long requires it too
SMALL_RESPONSE = 500  # numbers or names that are serialized on the event loop
MAX_GUESSES = 2**17  # classes in a response, for all of its images
SEND_CHUNK = 2**16  # bytes of a response that are sent at once
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
DEFAULT_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
PROCESS_ID, REQUEST_NUMBERS = token_hex(4), count(1)
VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a client; others are replaced
CLIENT_CLOSED_REQUEST = 499  # logged status of a client that disconnected; nothing is sent
HTTP_ERRORS = {404: "not found; see /docs", 405: "method not allowed; see /docs"}


class AppState:
    """What the routes share: models, batcher, admission, metrics, and the server's health."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.in_flight = 0
        self.metrics = Metrics(
            queue=lambda: self.admission.images,
            in_flight=lambda: self.in_flight,
            stuck=lambda: len(self.stuck_seconds),
        )
        self.batcher = Batcher(self.metrics)
        self.admission = AdmissionController(config, lambda: self.batcher.throughput)
        self.pool = DecodePool(config)
        self.registry = ModelRegistry()
        self.examples: dict[str, list[Example]] = {}
        self.teach_folders: dict[str, Path | None] = {}
        self.warm = self.warm_up_failed = self.draining = False
        self.unrecoverable = False  # so many threads are stuck that only a restart helps

    def add_model(
        self, name: str, predictor: Predictor, memory: ProbeMemory | None = None, digest: str = ""
    ) -> None:
        model = ServedModel(name, predictor, self.pool, self.metrics, memory=memory, digest=digest)
        self.registry.models[name] = model

    async def warm_up(self) -> None:
        """Run every model once, tune its batch size if none is set, and find example images."""
        able, models, size = set(), list(self.registry.models.values()), self.config.batch
        for served in models:
            run = partial(run_blank, served.predictor)
            full = partial(run, size) if size else partial(tune_batch_size, served.predictor)
            for attempt in (full, partial(run, 1)):
                try:
                    (batch_size,) = await self.batcher.submit(SingleWork(attempt), [None]).done
                except Exception as error:
                    log_event(f"warm-up of {served.name}", self.config.log, error)
                    continue
                able.add(served)
                if attempt is full:  # else the default is as good as any
                    served.batch_size = batch_size
                break
        self.warm_up_failed = len(able) < len(models)
        self.warm = not self.warm_up_failed
        for name, served in list(self.registry.models.items()):
            if name not in self.examples:
                metadata, data = served.predictor.metadata, self.config.examples
                self.examples[name] = await asyncio.to_thread(find_examples, metadata, data)

    @property
    def stuck_seconds(self) -> list[float]:
        """How long each thread beyond the watchdog's limit has been stuck."""
        now = time.monotonic()
        seconds = [now - start for start in list(self.batcher.abandoned.values())]
        seconds += [self.batcher.batch_seconds, *self.pool.busy_seconds()]
        return [age for age in seconds if age > self.config.watchdog]

    def check_threads(self) -> bool:
        """Replace stuck threads; return whether the process must be restarted."""
        limit = self.config.watchdog
        self.pool.add_threads()
        if self.batcher.batch_seconds > limit and (self.warm or self.warm_up_failed):
            text = f"the work took longer than {limit:g} s and was abandoned"
            log_event(f"{text}; another thread takes over", self.config.log)
            self.batcher.abandon(ApiError(503, text, reason="stuck"))
        if not self.unrecoverable:
            stuck = self.stuck_seconds
            longest = max(stuck, default=0)
            self.unrecoverable = len(stuck) >= MAX_STUCK_THREADS or longest > MAX_STUCK_TIME * limit
            if self.unrecoverable:
                text = f"{len(stuck)} threads are stuck, for up to {longest:.0f} s; shutting down"
                log_event(text, self.config.log)
        return self.unrecoverable

    def close(self) -> None:
        self.batcher.stop()
        self.pool.close()

    async def run(self, request: Request, work: Work, items: Sequence[Any]) -> list[Any]:
        """Run work on items; give up on timeout or when the client disconnects."""
        job = self.batcher.submit(work, items)
        loop, seconds = asyncio.get_running_loop(), self.config.timeout
        deadline = loop.time() + seconds
        try:
            while not job.done.done() and (left := deadline - loop.time()) > 0:
                await asyncio.wait([job.done], timeout=min(POLL_SECONDS, left))
                if not job.done.done() and await request.is_disconnected():
                    raise ClientDisconnect
            request.scope[RECORD].batch = 0 if isinstance(work, SingleWork) else job.batch
            if job.done.done():
                return job.done.result()
            raise ApiError(504, f"no result within {seconds:g} s", reason="timeout")
        finally:
            self.batcher.cancel(job)
            images = (item.image for item in items if isinstance(item, ImageItem))
            for image in work.images if isinstance(work, SingleWork) else images:
                if image is not None:
                    image.cancel()


def make_app(state: AppState) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(state.warm_up())
        yield
        warm_up.cancel()

    document = schemas.openapi_document(ROUTES, token=bool(state.config.token))
    routes = [*ROUTES, Route("/openapi.json", JSONResponse(document), methods=["GET"])]
    app = RequestMiddleware(Router(routes, redirect_slashes=False, lifespan=lifespan), state)
    if not state.config.allow_origin:
        return app
    return CORSMiddleware(
        app,
        allow_origins=state.config.allow_origin,
        allow_methods=("GET", "POST"),
        allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def error_response(error: BaseException) -> Response:
    """Return every error as one line of JSON."""
    match error:
        case ApiError():
            return ErrorResponse(error)
        case VitrailError():
            return ErrorResponse(ApiError(422, str(error), reason="impossible"))
        case HTTPException():  # of the router
            text = HTTP_ERRORS.get(error.status_code, error.detail)
            headers = error.headers or {}
            return ErrorResponse(ApiError(error.status_code, text, reason="path", headers=headers))
        case asyncio.CancelledError():  # the grace period is over
            return ErrorResponse(shutting_down())
    return ErrorResponse(ApiError(500, "internal server error", reason="bug"))


class RequestMiddleware:
    """Around every request: access checks, errors, log, metrics, response headers.

    Plain ASGI for speed, because many rejected requests pass through here. What it wraps is a
    `Router`, because a `Starlette` application has three more layers that handle errors.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self.app, self.state = app, state
        self.patterns: dict[Any, str] = {route.endpoint: route.path for route in ROUTES}
        self.patterns |= {path: path for path in self.patterns.values()}  # rejected before routing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state, headers = self.state, dict(scope["headers"])
        id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not VALID_REQUEST_ID.fullmatch(id):
            id = f"{PROCESS_ID}-{next(REQUEST_NUMBERS)}"
        record = scope[RECORD] = RequestRecord(id, scope["method"], headers)
        scope["app"] = state  # `Request.app`
        send = partial(self.send, record, send)
        state.in_flight += 1
        try:
            check_request(scope, headers, state.config, state.admission, state.draining)
            await self.app(scope, receive, send)
        except ClientDisconnect:
            record.status = CLIENT_CLOSED_REQUEST
        except (Exception, asyncio.CancelledError) as error:
            state.admission.release(record)  # before a response that may be read slowly
            response = error_response(error)
            if response.status_code == 500:
                log_event(f"{record.id}: internal error", state.config.log, error)
            error.__traceback__ = None  # its frames keep the images in memory
            if not record.status:
                await response(scope, receive, send)
        finally:
            state.in_flight -= 1
            state.admission.release(record)
            # the pattern that matched, so that the number of metrics is bounded
            record.route = self.patterns.get(scope.get("endpoint", scope["path"]), "other")
            seconds = time.perf_counter() - record.start
            state.metrics.requests.labels(record.route, str(record.status)).inc()
            state.metrics.request_seconds.labels(record.route).observe(seconds)
            if record.reason and record.route != "/ready":
                state.metrics.rejected.labels(record.reason).inc()
            log_request(record, seconds, state.config.log)

    async def send(self, record: RequestRecord, send: Send, message: Message) -> None:
        """Add headers, record the status, and send long bodies in chunks.

        With chunks, all but the last one has been sent when this returns.
        """
        if message["type"] == "http.response.start":
            record.status = message["status"]
            headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
            if not any(name == DEFAULT_POLICY[0] for name, _ in headers):
                headers.append(DEFAULT_POLICY)
            if self.state.draining:
                headers.append((b"connection", b"close"))
            headers += [*SECURITY_HEADERS, (b"x-request-id", record.id.encode())]
            message = {**message, "headers": headers}
        elif len(body := message.get("body", b"")) > SEND_CHUNK:
            *offsets, last = range(0, len(body), SEND_CHUNK)
            view = memoryview(body)
            for offset in offsets:
                part = bytes(view[offset : offset + SEND_CHUNK])
                await send({**message, "body": part, "more_body": True})
            message = {**message, "body": bytes(view[last:])}
        await send(message)


# Routes. Those that take images come first, since routes are matched in order.

ROUTES: list[ApiRoute] = []
Handler = Callable[[AppState, Request, Any], Awaitable[BaseModel | Response]]
upload = partial(
    ApiRoute,
    "POST",
    query=schemas.ModelQuery,
    body=schemas.IMAGE_BODY,
    errors=schemas.UPLOAD_ERRORS,
)
lookup = partial(ApiRoute, "GET", query=schemas.ModelQuery, errors=schemas.LOOKUP_ERRORS)
public = partial(ApiRoute, "GET", errors=schemas.PUBLIC_ERRORS)


def route(
    kind: Callable[..., ApiRoute],
    path: str,
    summary: str,
    response: type[BaseModel] | tuple[str, ...],
    **more: Any,
) -> Callable[[Handler], Handler]:
    """Register a handler; `more` are further arguments of `ApiRoute`."""

    def register(handler: Handler) -> Handler:
        ROUTES.append(kind(path, handler, summary=summary, response=response, **more))
        return handler

    return register


@route(upload, "/predict", "Classify images", schemas.PredictResponse, query=schemas.PredictQuery)
async def predict(state: AppState, request: Request, query: schemas.PredictQuery) -> Response:
    served = state.registry.get(query.model)
    if not (classes := len(served.predictor.classes)):
        raise ApiError(422, "the model has no classes; use /features, or teach it some")
    options = (query.top, query.threshold)
    size = min(query.top, classes)
    predictions, header = await run_on_images(
        state, request, served, served.predict, *options, per_image=size
    )
    header["warning"] = ""
    if conformal := served.predictor.conformal:
        served.confidences.extend(p.probability for p in predictions if not p.error)
        header["warning"] = conformal.drift(served.confidences)
    make = partial(schemas.PredictResponse, **header, answers=predictions)
    return await json_response(make, len(predictions) * size)


@route(upload, "/features", "Extract features", schemas.FeaturesResponse)
async def features(state: AppState, request: Request, query: schemas.ModelQuery) -> Response:
    served = state.registry.get(query.model)
    vectors, header = await run_on_images(state, request, served, served.features)
    return await json_response(
        lambda: schemas.FeaturesResponse(
            **header,
            features=[None if x.values is None else x.values.tolist() for x in vectors],
            answers=vectors,
        )
    )


@route(upload, "/explain", "Draw a class explanation", ("image/png",), query=schemas.ExplainQuery)
async def explain(state: AppState, request: Request, query: schemas.ExplainQuery) -> Response:
    draw = partial(registry.explain, method=query.method, label=query.label)
    png = await run_on_one_image(state, request, query, load_image, draw)
    return Response(png, media_type="image/png")


@route(upload, "/attention", "Attention maps of all layers and heads", schemas.AttentionResponse)
async def attention(state: AppState, request: Request, query: schemas.ModelQuery) -> Response:
    maps = await run_on_one_image(state, request, query, registry.load_view, registry.attention)
    return await json_response(lambda: maps)


@route(
    upload,
    "/teach",
    "Add or replace a class with a few images of it",
    schemas.TeachResponse,
    query=schemas.TeachQuery,
    body=schemas.FORM_BODY,
)
async def teach(state: AppState, request: Request, query: schemas.TeachQuery) -> Response:
    served = state.registry.get(query.model)
    if served.memory is None:
        text = "teaching is disabled; start the server with --allow-teach"
        raise ApiError(403, text, reason="teach")
    label = " ".join(query.name.split())
    if not (label and label.isprintable()):
        raise ApiError(422, "the class name must be printable text", reason="parameter")
    uploads = await read_uploads(request, state.admission, heavy=True)
    folder = state.teach_folders.get(served.name)
    images = [state.pool.submit(x.data, served.predictor.preprocess) for x in uploads]
    fit = partial(registry.teach, state.registry, served.name, label, uploads, images, folder)
    (response,) = await state.run(request, SingleWork(fit, images), [None])
    return await json_response(lambda: response)


async def run_on_images(
    state: AppState,
    request: Request,
    served: ServedModel,
    work: Work,
    *options: Any,
    per_image: int = 1,
) -> tuple[list[Any], dict[str, Any]]:
    """Run a model on the images of a request; return the results and the response's header."""
    uploads = await read_uploads(request, state.admission)
    if len(uploads) * per_image > MAX_GUESSES:
        text = f"more than {MAX_GUESSES:,} classes for all images; lower top or send fewer images"
        raise ApiError(413, text, reason="size")
    start = time.perf_counter()
    results = await state.run(request, work, [ImageItem(*x, *options) for x in uploads])
    if all(result.error for result in results):
        first = results[0].error
        text = f"none of {len(results)} images could be read: {first}"
        raise ApiError(422, first if len(results) == 1 else text, reason="unreadable")
    seconds = round(time.perf_counter() - start, 5)
    engine = served.predictor.engine.name
    return results, {"model": served.name, "engine": engine, "seconds": seconds}


async def run_on_one_image(
    state: AppState,
    request: Request,
    query: schemas.ModelQuery,
    prepare: Callable[[Model, bytes], Any],
    function: Callable[[Model, Any], Any],
) -> Any:
    """Run a heavy function on the single image of a request, after `prepare` has decoded it."""
    model = state.registry.get(query.model).predictor.model
    if model is None:
        raise ApiError(422, "an exported model supports /predict and /features only")
    uploads = await read_uploads(request, state.admission, heavy=True)
    if len(uploads) != 1:
        raise ApiError(400, f"expected one image, got {len(uploads)}", reason="form")
    image = state.pool.submit(uploads[0].data, partial(prepare, model))
    work = SingleWork(lambda: function(model, image.result()), [image])
    (result,) = await state.run(request, work, [None])
    return result


async def json_response(make: Callable[[], BaseModel], size: int = SMALL_RESPONSE + 1) -> Response:
    """Return JSON of about `size` numbers or names; large ones are made in a thread."""
    if size <= SMALL_RESPONSE:
        body = make().model_dump_json().encode()
    else:
        body = await asyncio.to_thread(lambda: make().model_dump_json().encode())
    return Response(body, media_type="application/json")


@route(public, "/health", "Liveness probe", schemas.StatusResponse)
async def health(state: AppState, *_: Any) -> schemas.StatusResponse:
    if state.unrecoverable:
        text = "too many threads are stuck; the server is shutting down and must be restarted"
        raise ApiError(503, text, reason="lost", headers={"Retry-After": "60"})
    return schemas.StatusResponse(status="alive")


@route(public, "/ready", "Readiness probe", schemas.StatusResponse)
async def ready(state: AppState, *_: Any) -> schemas.StatusResponse:
    if state.draining:
        raise shutting_down()
    seconds = state.config.timeout  # within which no request is answered while all are stuck
    slow_decoders = sum(age > seconds for age in state.pool.busy_seconds())
    stalled = state.batcher.batch_seconds > seconds
    stalled |= slow_decoders >= state.pool.size + MAX_SPARES
    for failed, text, reason, seconds in (
        (state.warm_up_failed, "a model cannot run; see the server's log", "unable", 60),
        (not state.warm, "the models are warming up", "warming", 1),
        (stalled or state.unrecoverable, "the compute threads are stuck", "stuck", 30),
    ):
        if failed:
            raise ApiError(503, text, reason=reason, headers={"Retry-After": str(seconds)})
    return schemas.StatusResponse(status="ready")


@route(partial(ApiRoute, "GET"), "/metrics", "Prometheus metrics", ("text/plain",))
async def metrics(state: AppState, *_: Any) -> Response:
    return Response(generate_latest(state.metrics.registry), media_type="text/plain; version=0.0.4")


@route(partial(ApiRoute, "GET"), "/models", "List models", schemas.ModelList)
async def models(state: AppState, *_: Any) -> schemas.ModelList:
    return schemas.ModelList(models=list(state.registry.models))


@route(lookup, "/model", "Describe a model", schemas.ModelInfo)
async def model(state: AppState, _: Request, query: schemas.ModelQuery) -> Response:
    served = state.registry.get(query.model)
    return await json_response(lambda: served.info, len(served.predictor.classes))


@route(lookup, "/examples", "List example images", schemas.ExampleList)
async def examples(state: AppState, _: Request, query: schemas.ModelQuery) -> schemas.ExampleList:
    known = enumerate(state.examples.get(state.registry.get(query.model).name, ()))
    return schemas.ExampleList([schemas.ExampleInfo(id=str(n), label=x.label) for n, x in known])


@route(lookup, "/examples/{id}", "Get an example image", tuple(MEDIA_TYPES.values()))
async def example(state: AppState, request: Request, query: schemas.ModelQuery) -> Response:
    known = state.examples.get(state.registry.get(query.model).name, [])
    id = request.path_params["id"]
    if not (id.isascii() and id.isdigit() and len(id) < 4 and int(id) < len(known)):
        raise ApiError(404, f"no such example; there are {len(known)}")
    return Response(known[int(id)].data, media_type=known[int(id)].media_type)


# Pages: one HTML file each, with style and script inlined, that loads nothing from other hosts.

STYLES = {"page.html": ("base.css", "page.css"), "docs.html": ("base.css", "docs.css")}
SCRIPTS = {  # concatenated, so that each can use those before it
    "page.html": (
        *("api.js", "images.js", "overlay.js", "state.js"),
        *("uploads.js", "results.js", "explanations.js", "page.js"),
    ),
    "docs.html": ("docs.js",),
}


@cache
def build_page(name: str) -> tuple[str, str]:
    """Return a page and its Content-Security-Policy, which allows its style and script only."""
    assets = resources.files("vitrail.serving") / "assets"
    style, script = (
        "\n".join((assets / part).read_text(encoding="utf-8") for part in parts[name])
        for parts in (STYLES, SCRIPTS)
    )
    assert "</script" not in script, "it would end the script element"
    icon = quote((assets / "icon.svg").read_text(encoding="utf-8"))  # or /favicon.ico is requested
    template = Template((assets / name).read_text(encoding="utf-8"))
    html = template.substitute(style=style, script=script, icon=f"data:image/svg+xml,{icon}")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' blob: data:; "
        f"style-src {csp_hash(style)}; script-src {csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


async def html_page(name: str, *_: Any) -> Response:
    html, policy = build_page(name)
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


route(public, "/", "Web page", ("text/html",))(partial(html_page, "page.html"))
route(public, "/docs", "API page", ("text/html",))(partial(html_page, "docs.html"))
