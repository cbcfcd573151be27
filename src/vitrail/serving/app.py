"""The application: routes, error handling, the middleware around them, and the pages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from string import Template
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail import __version__
from vitrail.errors import VitrailError
from vitrail.inspection.pictures import Picture, prepared
from vitrail.models.vit import Model
from vitrail.prediction.results import Prediction
from vitrail.reports.html import csp_hash
from vitrail.serving import overlay, schemas
from vitrail.serving.batching import FeatureVector, ImageItem
from vitrail.serving.limits import (
    PUBLIC_PATHS,
    ApiError,
    ClientDisconnectedError,
    ErrorResponse,
    NoResponse,
    check_request,
    shutting_down,
)
from vitrail.serving.metrics import (
    RECORD,
    RequestRecord,
    log_exception,
    log_request,
    record_of,
    request_id,
)
from vitrail.serving.registry import MEDIA_TYPES
from vitrail.serving.schemas import error_responses, file_response
from vitrail.serving.state import AppState
from vitrail.serving.teaching import teach as teach_class

SMALL_RESPONSE = 500  # numbers or names that are serialized on the event loop
SEND_CHUNK = 2**16  # bytes of a response that are sent at once
TELEMETRY_OFF: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
DEFAULT_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
HTTP_ERRORS = {404: "not found; see /docs", 405: "method not allowed; see /docs"}


def make_app(state: AppState) -> ASGIApp:
    """Build the ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(state.warm_up())
        yield
        warm_up.cancel()

    app = FastAPI(
        title="vitrail",
        version=__version__,
        description=schemas.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=TELEMETRY_OFF,
        routes=router.routes,  # flat: an included router is searched on every request
    )
    app.state.vitrail = state
    for kind in (
        *(ApiError, VitrailError, ClientDisconnectedError),
        *(RequestValidationError, HTTPException, Exception),
    ):
        app.add_exception_handler(kind, handle_error)
    if state.config.token:
        document = app.openapi()
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in PUBLIC_PATHS & document["paths"].keys():
            document["paths"][path]["get"]["security"] = []
    guarded = RequestMiddleware(app, state)
    if not state.config.allow_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=state.config.allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Return every error as one line of JSON; what the request reserved is released first."""
    if (reservation := record_of(request.scope).reservation) is not None:
        reservation.release()
    match error:
        case ApiError():
            return ErrorResponse(error)
        case ClientDisconnectedError():
            return NoResponse()
        case VitrailError():
            return ErrorResponse(ApiError(422, str(error), reason="impossible"))
        case RequestValidationError():
            first = error.errors()[0]
            text = f"{first['loc'][-1]}: {first['msg']}"
            return ErrorResponse(ApiError(422, text, reason="parameter"))
        case HTTPException():
            text = HTTP_ERRORS.get(error.status_code, str(error.detail))
            headers = error.headers or {}
            return ErrorResponse(ApiError(error.status_code, text, reason="path", headers=headers))
    return ErrorResponse(ApiError(500, "internal server error", reason="bug"))


class RequestMiddleware:
    """Around every request: access checks, log, metrics, response headers.

    Plain ASGI, because rejected requests pass here by the hundred.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self.app, self.state = app, state
        self.host_names = state.config.host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = self.state
        headers: dict[bytes, bytes] = dict(scope["headers"])
        id = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        record = scope[RECORD] = RequestRecord(id, scope["method"])
        send = partial(self.send, record, send)
        state.in_flight += 1
        try:
            check_request(
                scope,
                headers,
                config=state.config,
                host_names=self.host_names,
                admission=state.admission,
                draining=state.draining,
            )
            await self.app(scope, receive, send)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send)
        except asyncio.CancelledError:  # the grace period is over
            if not record.status:
                await ErrorResponse(shutting_down())(scope, receive, send)
        except Exception as error:  # a bug; status 500 was sent already
            log_exception(record.id, record.route, error, state.config.log)
        finally:
            state.in_flight -= 1
            if record.reservation is not None:
                record.reservation.release()
            # the pattern that matched, so that the number of metrics is bounded
            record.route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - record.start
            state.metrics.requests.labels(record.route, str(record.status)).inc()
            state.metrics.request_seconds.labels(record.route).observe(seconds)
            if record.reason:
                state.metrics.rejected.labels(record.reason).inc()
            log_request(record, seconds, state.config.log)

    async def send(self, record: RequestRecord, send: Send, message: Message) -> None:
        """Add headers, note the status, and send long bodies in chunks.

        In chunks, so that all but the last of a response was sent when this returns.
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

UPLOAD: dict[str, Any] = {
    "responses": error_responses(400, 401, 403, 404, 408, 413, 415, 422, 503, 504),
    "openapi_extra": schemas.IMAGE_BODY,
}
PUBLIC: dict[str, Any] = {"responses": error_responses(403, 503)}
PROTECTED: dict[str, Any] = {"responses": error_responses(401, 403, 503)}
LOOKUP: dict[str, Any] = {"responses": error_responses(401, 403, 503, 404, 422)}
ModelQuery = Annotated[schemas.ModelQuery, Query()]
router = APIRouter()


def state_of(request: Request) -> AppState:
    return request.app.state.vitrail


@router.post(
    "/predict", summary="Classify images", response_model=schemas.PredictResponse, **UPLOAD
)
async def predict(request: Request, query: Annotated[schemas.PredictQuery, Query()]) -> Response:
    state = state_of(request)
    served = state.registry.get(query.model)
    if not (classes := len(served.predictor.classes)):
        raise ApiError(422, "the model has no classes; use /features, or teach it some")
    uploads = await state.receive(request)
    start = time.perf_counter()
    items = [ImageItem(*upload, query.top, query.threshold) for upload in uploads]
    predictions = await state.run(request, served.predict, items)
    check_readable(predictions)
    seconds = time.perf_counter() - start
    make = partial(schemas.PredictResponse, **served.header(seconds), answers=predictions)
    return await json_response(make, len(predictions) * min(query.top, classes))


@router.post(
    "/features", summary="Extract features", response_model=schemas.FeaturesResponse, **UPLOAD
)
async def features(request: Request, query: ModelQuery) -> Response:
    state = state_of(request)
    served = state.registry.get(query.model)
    uploads = await state.receive(request)
    start = time.perf_counter()
    vectors = await state.run(request, served.features, [ImageItem(*x) for x in uploads])
    check_readable(vectors)
    header = served.header(time.perf_counter() - start)

    def make() -> schemas.FeaturesResponse:
        rows = [None if vector.values is None else vector.values.tolist() for vector in vectors]
        return schemas.FeaturesResponse(**header, features=rows, answers=vectors)

    return await json_response(make)


@router.post(
    "/explain",
    summary="Draw where the model looks for a class",
    response_class=Response,
    responses=UPLOAD["responses"] | file_response("The image with a heat map.", "image/png"),
    openapi_extra=schemas.IMAGE_BODY,
)
async def explain(request: Request, query: Annotated[schemas.ExplainQuery, Query()]) -> Response:
    def draw(model: Model, image: Picture) -> bytes:
        return overlay.explain(model, image, method=query.method, label=query.label)

    png = await run_on_one_image(request, query, prepared, draw)
    return Response(png, media_type="image/png")


@router.post(
    "/attention",
    summary="Return the attention maps of every layer and head",
    response_model=schemas.AttentionResponse,
    **UPLOAD,
)
async def attention(request: Request, query: ModelQuery) -> Response:
    maps = await run_on_one_image(request, query, overlay.view, overlay.attention)
    return await json_response(lambda: maps)


@router.post(
    "/teach",
    summary="Add or replace a class with a few images of it",
    response_model=schemas.TeachResponse,
    responses=UPLOAD["responses"],
    openapi_extra=schemas.FORM_BODY,
)
async def teach(request: Request, query: Annotated[schemas.TeachQuery, Query()]) -> Response:
    state = state_of(request)
    served = state.registry.get(query.model)
    if served.memory is None:
        text = "teaching is disabled; start the server with --allow-teach"
        raise ApiError(403, text, reason="teach")
    label = " ".join(query.name.split())
    if not (label and label.isprintable()):
        raise ApiError(422, "the class name must be printable text", reason="parameter")
    uploads = await state.receive(request, heavy=True)
    folder = state.teach_folders.get(served.name)
    images = [state.pool.submit(x.data, served.predictor.preprocess) for x in uploads]
    fit = partial(teach_class, state.registry, served.name, label, uploads, images, folder)
    response = await state.run_heavy(request, fit, images)
    return await json_response(lambda: response)


async def run_on_one_image(
    request: Request,
    query: schemas.ModelQuery,
    prepare: Callable[[Model, bytes], Any],
    function: Callable[[Model, Any], Any],
) -> Any:
    """Run a heavy function on the single image of a request, after `prepare` has decoded it."""
    state = state_of(request)
    model = state.registry.get(query.model).predictor.model
    if model is None:
        raise ApiError(422, "an exported model supports /predict and /features only")
    uploads = await state.receive(request, heavy=True)
    if len(uploads) != 1:
        raise ApiError(400, f"expected one image, got {len(uploads)}", reason="form")
    image = state.pool.submit(uploads[0].data, partial(prepare, model))
    return await state.run_heavy(request, lambda: function(model, image.result()), [image])


def check_readable(results: Sequence[Prediction] | Sequence[FeatureVector]) -> None:
    """Reject a request of which no image can be read."""
    if all(result.error for result in results):
        first = results[0].error
        text = f"none of {len(results)} images could be read: {first}"
        raise ApiError(422, first if len(results) == 1 else text, reason="unreadable")


async def json_response(make: Callable[[], BaseModel], size: int = SMALL_RESPONSE + 1) -> Response:
    """Return JSON of about `size` numbers or names; large ones are made in a thread."""

    def serialize() -> bytes:
        return make().model_dump_json().encode()

    small = size <= SMALL_RESPONSE
    body = serialize() if small else await asyncio.to_thread(serialize)
    return Response(body, media_type="application/json")


@router.get("/", summary="Web page", response_class=HTMLResponse, **PUBLIC)
async def page() -> Response:
    return html_page("page.html")


@router.get("/docs", summary="API page", response_class=HTMLResponse, **PUBLIC)
async def docs() -> Response:
    return html_page("docs.html")


@router.get("/health", summary="Liveness probe", response_model=schemas.StatusResponse, **PUBLIC)
async def health(request: Request) -> Any:
    if state_of(request).unrecoverable:
        text = "too many threads are stuck; the server is shutting down and must be restarted"
        raise ApiError(503, text, reason="lost", headers={"Retry-After": "60"})
    return {"status": "alive"}


@router.get("/ready", summary="Readiness probe", response_model=schemas.StatusResponse, **PUBLIC)
async def ready(request: Request) -> Any:
    state = state_of(request)
    if state.draining:
        raise shutting_down()
    for failed, text, reason, seconds in (
        (state.warm_up_failed, "a model cannot run; see the server's log", "unable", 60),
        (not state.warm, "the models are warming up", "warming", 1),
        (state.is_stalled or state.unrecoverable, "the compute threads are stuck", "stuck", 30),
    ):
        if failed:
            raise ApiError(503, text, reason=reason, headers={"Retry-After": str(seconds)})
    return {"status": "ready"}


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=PROTECTED["responses"] | file_response("Prometheus text format.", "text/plain"),
)
async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/models", summary="List models", response_model=schemas.ModelList, **PROTECTED)
async def models(request: Request) -> Any:
    return {"models": list(state_of(request).registry.models)}


@router.get("/model", summary="Describe a model", response_model=schemas.ModelInfo, **LOOKUP)
async def model(request: Request, query: ModelQuery) -> Response:
    served = state_of(request).registry.get(query.model)
    return await json_response(lambda: served.info, len(served.predictor.classes))


@router.get(
    "/examples", summary="List example images", response_model=list[schemas.ExampleInfo], **LOOKUP
)
async def examples(request: Request, query: ModelQuery) -> Any:
    state = state_of(request)
    known = state.examples.get(state.registry.get(query.model).name, [])
    return [{"id": str(index), "label": example.label} for index, example in enumerate(known)]


@router.get(
    "/examples/{id}",
    summary="Get an example image",
    response_class=Response,
    responses=LOOKUP["responses"] | file_response("The image.", *MEDIA_TYPES.values()),
)
async def example(request: Request, id: str, query: ModelQuery) -> Response:
    state = state_of(request)
    known = state.examples.get(state.registry.get(query.model).name, [])
    if not (id.isascii() and id.isdigit() and len(id) < 4 and int(id) < len(known)):
        raise ApiError(404, f"no such example; there are {len(known)}")
    return Response(known[int(id)].data, media_type=known[int(id)].media_type)


# Pages: one HTML file each, with style and script inlined, that loads nothing from other hosts.

# Four panes of glass; without an icon in the page, browsers request /favicon.ico.
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16"
rx="3" fill="#1a1614"/><path d="M2 2h5v5H2z" fill="#b0183c"/><path d="M9 2h5v5H9z" fill="#de9618"/>
<path d="M2 9h5v5H2z" fill="#1c4ea8"/><path d="M9 9h5v5H9z" fill="#0c7854"/></svg>"""
STYLES = {"page.html": ("base.css", "page.css"), "docs.html": ("base.css", "docs.css")}
SCRIPTS = {  # concatenated, so that each can use those before it
    "page.html": (
        *("api.js", "images.js", "mosaic.js", "state.js"),
        *("uploads.js", "results.js", "explanations.js", "page.js"),
    ),
    "docs.html": ("docs.js",),
}


@cache
def build_page(name: str) -> tuple[str, str]:
    """Return a page and its Content-Security-Policy, which allows its style and script only."""

    def asset(name: str) -> str:
        file = resources.files("vitrail.serving") / "assets" / name
        return file.read_text(encoding="utf-8")

    style, script = ("\n".join(map(asset, parts[name])) for parts in (STYLES, SCRIPTS))
    assert "</script" not in script, "it would end the script element"
    icon = f"data:image/svg+xml,{quote(ICON)}"
    html = Template(asset(name)).substitute(style=style, script=script, icon=icon)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' blob: data:; "
        f"style-src {csp_hash(style)}; script-src {csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def html_page(name: str) -> Response:
    html, policy = build_page(name)
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})
