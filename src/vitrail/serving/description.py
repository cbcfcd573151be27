"""What the OpenAPI file says of bodies, answers and errors. Only described, not enforced, here."""

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel

from vitrail.serving.bodies import FIELD, FORM

ABOUT = """Pictures in, answers out. Send the bytes of one picture as the body, or a form with one
or many files in the field `pictures`. Every error is `{"error": "one line"}`."""

ModelName = Annotated[str | None, Query(description="One of /models; the first if not given.")]
PICTURE: dict[str, Any] = {"type": "string", "format": "binary"}
FILES = {"type": "array", "items": PICTURE, "minItems": 1}
FORM_SCHEMA = {"type": "object", "required": [FIELD], "properties": {FIELD: FILES}}
BODY = {
    "required": True,
    "content": {
        FORM: {"schema": FORM_SCHEMA},
        "image/*": {"schema": PICTURE},
        "application/octet-stream": {"schema": PICTURE},
    },
}
FORM_BODY = {"required": True, "content": {FORM: {"schema": FORM_SCHEMA}}}


class Problem(BaseModel):
    error: str


class GuessTold(BaseModel):
    label: str
    probability: float


class AnswerTold(BaseModel):
    """One picture. `label` is empty if the model is not sure, `error` unless it is unreadable."""

    name: str
    label: str
    labels: list[str]
    guesses: list[GuessTold]
    error: str


class Answers(BaseModel):
    model: str
    engine: str
    seconds: float
    answers: list[AnswerTold]


class VectorTold(BaseModel):
    name: str
    error: str


class Features(BaseModel):
    """`features` has a row for each of `answers`; null where a picture cannot be read."""

    model: str
    engine: str
    seconds: float
    features: list[list[float] | None]
    answers: list[VectorTold]


class Lesson(BaseModel):
    """What became of a lesson. `accuracy`: each remembered picture left out in turn."""

    model: str
    engine: str
    seconds: float
    classes: list[str]
    pictures: int
    replaced: bool
    accuracy: float | None
    notes: list[str]
    errors: list[VectorTold]


class Attention(BaseModel):
    """Bytes (layers, heads, height, width) in base64, and what the largest of each stands for."""

    grid: list[int]
    layers: int
    heads: int
    box: list[float]
    lag: float
    maps: str
    peaks: list[list[float]]
    rollout: str


class LimitsTold(BaseModel):
    bytes: int
    pictures: int
    pixels: int
    seconds: float


class ModelTold(BaseModel):
    name: str
    architecture: str
    classes: list[str]
    image_size: list[int]
    channels: int
    parameters: int | None  # null for an exported model
    engine: str
    multi_label: bool
    methods: list[str]
    layers: int
    heads: int
    teach: bool
    limits: LimitsTold


class Names(BaseModel):
    models: list[str]


class ExampleTold(BaseModel):
    id: str
    label: str


class State(BaseModel):
    status: str


PROBLEMS = {
    400: "the request is broken, or has no picture in it",
    401: "the server wants a token",
    403: "not allowed here: a page of another site asks, or by another name, or teaching is off",
    404: "there is no such thing",
    408: "the body came too slowly",
    413: "too many bytes or too many pictures",
    415: "neither a picture nor a form",
    422: "no picture can be read, or a parameter is impossible",
    503: "too many are waiting, or the server is stopping or stuck; see Retry-After",
    504: "no answer in time",
}
ASKING = (401, 403, 503)  # what every route but the open ones may answer
SENDING = (400, 401, 403, 404, 408, 413, 415, 422, 503, 504)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route may answer with."""
    return {s: {"model": Problem, "description": PROBLEMS[s]} for s in statuses}


def answer(model: Any) -> dict[int | str, dict[str, Any]]:
    """A good answer, as JSON."""
    return {200: {"model": model}}


def content(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    """A good answer that is no JSON."""
    schemas: dict[str, dict[str, Any]] = {
        kind: {"schema": {"type": "string"} if kind.startswith("text/") else PICTURE}
        for kind in media_types
    }
    return {200: {"description": description, "content": schemas}}
