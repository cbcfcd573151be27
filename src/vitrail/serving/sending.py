"""The routes to which pictures are sent.

FastAPI describes them, but they are called by `Direct` in `app.py`: its own way through routing and
dependencies would take as long as a small model takes for a picture.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from vitrail.inspection.pictures import Picture, prepared
from vitrail.models.build import Model
from vitrail.prediction.answers import USUAL_TOP, Answer
from vitrail.serving import description as told
from vitrail.serving import looking
from vitrail.serving.house import House
from vitrail.serving.lessons import LONGEST_NAME, teach
from vitrail.serving.refusals import Refusal
from vitrail.serving.replies import as_json, json_response, written
from vitrail.serving.shelf import Served
from vitrail.serving.work import Alone, Piece, Vector, checked


class Asked(BaseModel):
    """What stands behind the question mark of an address."""

    model: str | None = Field(None, description="One of /models; the first if not given.")


class AskedForAnswers(Asked):
    top: int = Field(USUAL_TOP, ge=1, description="How many classes are told.")
    threshold: float | None = Field(None, ge=0, le=1, description="Below it, nothing is decided.")


class AskedForOverlay(Asked):
    method: str | None = Field(
        None, description="One of the methods that /model tells; the first if not given."
    )
    label: str | None = Field(None, alias="class", description="The likeliest if not given.")


class AskedForLesson(Asked):
    name: str = Field(
        min_length=1, max_length=LONGEST_NAME, description="What the class is called."
    )


async def predict(house: House, request: Request, asked: AskedForAnswers) -> Response:
    """What pictures show."""
    served = house.shelf.get(asked.model)
    if not (classes := len(served.predictor.classes)):
        raise Refusal(422, "the model knows no classes; ask /features, or teach it some")
    place = house.enter(request)
    uploads = await house.pictures(request, place)
    begun = time.perf_counter()
    pieces = [Piece(*upload, asked.top, asked.threshold) for upload in uploads]
    answers = await house.do(request, served.answering, pieces)
    check_any(answers)
    write = partial(answers_json, served, time.perf_counter() - begun, answers)
    return await written(write, len(answers) * min(asked.top, classes))


async def features(house: House, request: Request, asked: Asked) -> Response:
    """Pictures as vectors."""
    served = house.shelf.get(asked.model)
    place = house.enter(request)
    uploads = await house.pictures(request, place)
    begun = time.perf_counter()
    pieces = [Piece(*upload) for upload in uploads]
    vectors = await house.do(request, served.featuring, pieces)
    check_any(vectors)
    return await written(partial(vectors_json, served, time.perf_counter() - begun, vectors))


async def explain(house: House, request: Request, asked: AskedForOverlay) -> Response:
    """Where a model looks, for a class."""

    def draw(model: Model, image: Picture) -> bytes:
        return looking.explain(model, image, method=asked.method, label=asked.label)

    png = await alone(house, request, asked, prepared, draw)
    return Response(png, media_type="image/png")


async def attention(house: House, request: Request, asked: Asked) -> Response:
    """Where every head looks."""

    def maps(model: Model, image: looking.View) -> bytes:
        return as_json(looking.attention(model, image))

    return json_response(await alone(house, request, asked, looking.view, maps))


async def lesson(house: House, request: Request, asked: AskedForLesson) -> Response:
    """A class, by a few pictures of it."""
    served = house.shelf.get(asked.model)
    if served.memory is None:
        text = "teaching is off; start the server with --allow-teach"
        raise Refusal(403, text, reason="teach")
    label = " ".join(asked.name.split())
    if not (label and label.isprintable()):
        raise Refusal(422, "a class needs a name of plain letters", reason="parameter")
    place = house.enter(request, heavy=True)
    uploads = await house.pictures(request, place)
    folder = house.places.get(served.name)
    prepare = served.answering.prepare
    images = [house.readers.submit(upload.data, prepare) for upload in uploads]

    def learn() -> bytes:
        return as_json(teach(house.shelf, served.name, label, uploads, images, folder))

    return json_response(await heavy(house, request, learn, images))


async def alone(
    house: House,
    request: Request,
    asked: Asked,
    prepare: Callable[[Model, bytes], Any],
    work: Callable[[Model, Any], bytes],
) -> bytes:
    """What a heavy function makes of the one picture of a request, once that is prepared."""
    model = house.shelf.get(asked.model).predictor.model
    if model is None:
        raise Refusal(422, "an exported model can only be asked for answers and features")
    place = house.enter(request, heavy=True)
    uploads = await house.pictures(request, place)
    if len(uploads) != 1:
        raise Refusal(400, f"{len(uploads)} pictures came; send one", reason="form")
    data = uploads[0].data
    image = house.readers.submit(data, lambda data: prepare(model, checked(data, house.limits)))
    return await heavy(house, request, lambda: work(model, image.result()), [image])


async def heavy(
    house: House, request: Request, work: Callable[[], bytes], images: "Sequence[Future[Any]]"
) -> bytes:
    """The result of a function that runs alone, once its images are decoded."""
    try:
        (result,) = await house.do(request, Alone(work, images), [None])
    finally:
        for image in images:
            image.cancel()
    return result


def check_any(results: Sequence[Answer] | Sequence[Vector]) -> None:
    """Refuse a request of which no picture can be read."""
    if all(result.error for result in results):
        first = results[0].error
        text = f"none of {len(results)} pictures could be read: {first}"
        raise Refusal(422, first if len(results) == 1 else text, reason="unreadable")


def answers_json(served: Served, seconds: float, answers: Sequence[Answer]) -> bytes:
    told = [
        {
            "name": answer.name,
            "label": answer.label,
            "labels": answer.labels,
            "guesses": [{"label": x, "probability": p} for x, p in answer.guesses],
            "error": answer.error,
        }
        for answer in answers
    ]
    return as_json(about(served, seconds) | {"answers": told})


def vectors_json(served: Served, seconds: float, vectors: Sequence[Vector]) -> bytes:
    values = [None if v.values is None else v.values.tolist() for v in vectors]
    told = [{"name": vector.name, "error": vector.error} for vector in vectors]
    return as_json(about(served, seconds) | {"features": values, "answers": told})


def about(served: Served, seconds: float) -> dict[str, Any]:
    engine = served.predictor.engine.name
    return {"model": served.name, "engine": engine, "seconds": round(seconds, 5)}


@dataclass(frozen=True, kw_only=True)
class Route:
    """An address to send pictures to."""

    path: str
    function: Callable[[House, Request, Any], Awaitable[Response]]
    asked: type[Asked]
    answer: dict[int | str, dict[str, Any]]
    body: dict[str, Any] = field(default_factory=lambda: told.BODY)


ROUTES = (
    Route(
        path="/predict",
        function=predict,
        asked=AskedForAnswers,
        answer=told.answer(told.Answers),
    ),
    Route(path="/features", function=features, asked=Asked, answer=told.answer(told.Features)),
    Route(
        path="/explain",
        function=explain,
        asked=AskedForOverlay,
        answer=told.content("The picture, bright where it counts.", "image/png"),
    ),
    Route(path="/attention", function=attention, asked=Asked, answer=told.answer(told.Attention)),
    Route(
        path="/teach",
        function=lesson,
        asked=AskedForLesson,
        answer=told.answer(told.Lesson),
        body=told.FORM_BODY,
    ),
)
