"""Request and response schemas, and the routes and OpenAPI document that are made of them."""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vitrail import __version__
from vitrail.errors import unknown
from vitrail.prediction.predictor import DEFAULT_TOP
from vitrail.serving.limits import FORM_FIELD, FORM_TYPE, PUBLIC_PATHS, ApiError

DESCRIPTION = """Image classification with a Vision Transformer. Send one encoded image as the body,
or a form with one or more files in the field `pictures`. Every error is `{"error": "one line"}`."""
MAX_CLASS_NAME = 100


class ModelQuery(BaseModel):
    model: str | None = Field(None, description="One of /models; default: the first.")


class PredictQuery(ModelQuery):
    top: int = Field(DEFAULT_TOP, ge=1, description="Number of classes to return.")
    threshold: float | None = Field(None, ge=0, le=1, description="Abstain below this probability.")


class ExplainQuery(ModelQuery):
    method: str | None = Field(None, description="One of /model's methods; default: the first.")
    label: str | None = Field(None, alias="class", description="Default: the predicted class.")


class TeachQuery(ModelQuery):
    name: str = Field(min_length=1, max_length=MAX_CLASS_NAME, description="Name of the class.")


class ErrorBody(BaseModel):
    error: str


class GuessItem(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    label: str
    probability: float


class PredictionItem(BaseModel):
    """One image. `label` is empty below the threshold, `error` unless the image is unreadable."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    label: str
    labels: list[str]
    prediction_set: list[str]  # of a calibrated model: contains the true class
    guesses: list[GuessItem]
    error: str


class ResultHeader(BaseModel):
    model: str
    engine: str
    seconds: float


class PredictResponse(ResultHeader):
    """`warning` is set if recent images are unlike those that the model was calibrated with."""

    warning: str
    answers: list[PredictionItem]


class ImageStatus(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    name: str
    error: str


class FeaturesResponse(ResultHeader):
    """`features` has a row for each of `answers`; null where an image cannot be read."""

    features: list[list[float] | None]
    answers: list[ImageStatus]


class TeachResponse(ResultHeader):
    """`accuracy` is the leave-one-out accuracy on the remembered images; in `balanced_accuracy`,
    every class counts the same."""

    classes: list[str]
    pictures: int
    replaced: bool
    accuracy: float | None
    balanced_accuracy: float | None
    notes: list[str]
    errors: list[ImageStatus]


class AttentionResponse(BaseModel):
    """Attention maps as base64 bytes (layers, heads, height, width).

    `peaks` is the attention that 255 stands for, per layer and head. `rollout` is (height, width).
    `box` is the visible part of the image: top, left, height and width as fractions. `lag` is the
    offset of receptive fields up and to the left of their patches, in patches.
    """

    grid: list[int]
    layers: int
    heads: int
    box: list[float]
    lag: float
    maps: str
    peaks: list[list[float]]
    rollout: str


class LimitsInfo(BaseModel):
    bytes: int
    pictures: int
    pixels: int
    seconds: float


class ConformalInfo(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    method: str
    error_rate: float


class ModelInfo(BaseModel):
    name: str
    version: str = __version__  # of vitrail
    digest: str  # of the bundle's config.json or the model's file; empty for taught models
    architecture: str
    classes: list[str]
    image_size: list[int]
    channels: int
    parameters: int | None  # null for an .onnx file
    engine: str
    multi_label: bool
    conformal: ConformalInfo | None  # of a calibrated model
    methods: list[str]
    layers: int
    heads: int
    teach: bool
    limits: LimitsInfo


class ModelList(BaseModel):
    models: list[str]


class ExampleInfo(BaseModel):
    id: str
    label: str


class ExampleList(RootModel[list[ExampleInfo]]):
    pass


class StatusResponse(BaseModel):
    status: str


# Routes

ERRORS = {
    400: "malformed request, or no image in it",
    401: "missing or wrong token",
    403: "forbidden: cross-origin request, Host header not accepted, or teaching is disabled",
    404: "not found",
    408: "the body did not arrive in time",
    413: "too many bytes or images",
    415: "neither an image nor a form",
    422: "no image can be read, or a parameter is invalid",
    503: "overloaded, shutting down, or stuck; see Retry-After",
    504: "no result in time",
}
PUBLIC_ERRORS = (403, 503)
PROTECTED_ERRORS = (401, 403, 503)
LOOKUP_ERRORS = (401, 403, 404, 422, 503)
UPLOAD_ERRORS = tuple(ERRORS)
BINARY = {"type": "string", "format": "binary"}
FORM_SCHEMA = {
    "type": "object",
    "required": [FORM_FIELD],
    "properties": {FORM_FIELD: {"type": "array", "items": BINARY, "minItems": 1}},
}
FORM_BODY = {FORM_TYPE: {"schema": FORM_SCHEMA}}
IMAGE_BODY = FORM_BODY | {
    "image/*": {"schema": BINARY},
    "application/octet-stream": {"schema": BINARY},
}


class ApiRoute(Route):
    """A route whose schemas validate its query and describe it in the OpenAPI document.

    `handler` takes the application's state, the request and the validated query, and returns a
    `response` or an HTTP response. Without a model, `response` is a tuple of media types.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[[Any, Request, Any], Awaitable[BaseModel | Response]],
        *,
        summary: str,
        response: type[BaseModel] | tuple[str, ...],
        query: type[BaseModel] | None = None,
        body: dict[str, Any] | None = None,
        errors: Iterable[int] = PROTECTED_ERRORS,
    ) -> None:
        super().__init__(path, self.call, methods=[method])
        self.app = self.call  # without the error handlers that Starlette adds to a function
        self.method = method
        self.handler, self.summary, self.response = handler, summary, response
        self.query, self.body, self.errors = query, body, errors
        fields = query.model_fields if query else {}
        self.parameters = [field.alias or name for name, field in fields.items()]

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, query = Request(scope, receive), None
        if self.query:
            given = dict(request.query_params)
            for name in given:
                if name not in self.parameters:
                    raise unknown("parameter", name, self.parameters)
            try:
                query = self.query.model_validate(given)
            except ValidationError as error:
                first = error.errors()[0]
                text = f"{first['loc'][-1]}: {first['msg']}"
                raise ApiError(422, text, reason="parameter") from None
        result = await self.handler(request.app, request, query)
        if not isinstance(result, Response):
            result = Response(result.model_dump_json(), media_type="application/json")
        await result(scope, receive, send)


def openapi_document(routes: Iterable[ApiRoute], *, token: bool) -> dict[str, Any]:
    """Describe routes; with `token`, all but the public ones require one."""
    routes = list(routes)
    models = [ErrorBody, *(x.response for x in routes if not isinstance(x.response, tuple))]
    _, definitions = models_json_schema(
        [(model, "serialization") for model in dict.fromkeys(models)],
        ref_template="#/components/schemas/{model}",
    )
    contents: dict[Any, dict[str, Any]] = {
        model: {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        for model in models
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "vitrail", "version": __version__, "description": DESCRIPTION},
        "paths": {},
        "components": {"schemas": definitions["$defs"]},
    }
    if token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    for route in routes:
        parameters: list[dict[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ]
        query = route.query.model_json_schema() if route.query else {"properties": {}}
        for name, schema in query["properties"].items():
            text, required = schema.pop("description"), name in query.get("required", ())
            parameters.append(
                {"name": name, "in": "query", "required": required, "description": text}
                | {"schema": schema}
            )
        if isinstance(route.response, tuple):
            content: dict[str, Any] = {
                kind: {"schema": {"type": "string"} if kind.startswith("text/") else BINARY}
                for kind in route.response
            }
        else:
            content = contents[route.response]
        responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
        for status in sorted(route.errors):
            error = {"description": ERRORS[status], "content": contents[ErrorBody]}
            responses[str(status)] = error
        operation = {"summary": route.summary, "parameters": parameters, "responses": responses}
        if route.body:
            operation["requestBody"] = {"required": True, "content": route.body}
        if token and route.path in PUBLIC_PATHS:
            operation["security"] = []
        document["paths"].setdefault(route.path, {})[route.method.lower()] = operation
    return document
