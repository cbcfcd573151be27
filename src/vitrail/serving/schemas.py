"""Request and response schemas: what the routes return, and what the OpenAPI document says."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vitrail.prediction.results import DEFAULT_TOP
from vitrail.serving.limits import FORM_FIELD, FORM_TYPE

DESCRIPTION = """Image classification with a Vision Transformer. Send one encoded image as the body,
or a form with one or more files in the field `pictures`. Every error is `{"error": "one line"}`."""
MAX_CLASS_NAME = 100


class ModelQuery(BaseModel):
    model: str | None = Field(None, description="One of /models; default: the first.")


class PredictQuery(ModelQuery):
    top: int = Field(DEFAULT_TOP, ge=1, description="Number of classes to return.")
    threshold: float | None = Field(None, ge=0, le=1, description="Abstain below it.")


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
    guesses: list[GuessItem]
    error: str


class ResultHeader(BaseModel):
    model: str
    engine: str
    seconds: float


class PredictResponse(ResultHeader):
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
    """`accuracy` is the leave-one-out accuracy on the remembered images."""

    classes: list[str]
    pictures: int
    replaced: bool
    accuracy: float | None
    notes: list[str]
    errors: list[ImageStatus]


class AttentionResponse(BaseModel):
    """Attention maps as base64 bytes (layers, heads, height, width).

    `peaks` is the attention that 255 stands for, per layer and head. `rollout` is (height, width).
    `box` is the visible part of the image: top, left, height and width as fractions. `lag` is how
    far tokens see above and to the left of their patches, in patches.
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


class ModelInfo(BaseModel):
    name: str
    architecture: str
    classes: list[str]
    image_size: list[int]
    channels: int
    parameters: int | None  # null for an .onnx file
    engine: str
    multi_label: bool
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


class StatusResponse(BaseModel):
    status: str


# OpenAPI

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
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}
FORM_SCHEMA = {
    "type": "object",
    "required": [FORM_FIELD],
    "properties": {FORM_FIELD: {"type": "array", "items": BINARY, "minItems": 1}},
}
FORM_BODY = {"requestBody": {"required": True, "content": {FORM_TYPE: {"schema": FORM_SCHEMA}}}}
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            FORM_TYPE: {"schema": FORM_SCHEMA},
            "image/*": {"schema": BINARY},
            "application/octet-stream": {"schema": BINARY},
        },
    }
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a route's errors."""
    return {s: {"model": ErrorBody, "description": ERRORS[s]} for s in statuses}


def file_response(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry of a response that is not JSON."""
    content: dict[str, dict[str, Any]] = {
        kind: {"schema": {"type": "string"} if kind.startswith("text/") else BINARY}
        for kind in media_types
    }
    return {200: {"description": description, "content": content}}
