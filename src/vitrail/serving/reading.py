"""The routes that are only read."""

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from vitrail.serving import description as told
from vitrail.serving import docs_page, page
from vitrail.serving.examples import TYPES
from vitrail.serving.house import House
from vitrail.serving.refusals import Refusal, stopping
from vitrail.serving.replies import as_json, json_response, written


def add_reading(app: FastAPI, house: House) -> None:
    """The routes that are only read."""
    add_pages(app)
    add_state(app, house)
    add_models(app, house)


def add_pages(app: FastAPI) -> None:
    """What people look at."""
    open_to_all = told.problems(403, 503)

    @app.get("/", responses=open_to_all, response_class=HTMLResponse, summary="The page")
    async def root() -> Response:
        return HTMLResponse(page.page(), headers={"Content-Security-Policy": page.POLICY})

    @app.get("/docs", responses=open_to_all, response_class=HTMLResponse, summary="This, to read")
    async def docs() -> Response:
        headers = {"Content-Security-Policy": docs_page.POLICY}
        return HTMLResponse(docs_page.docs_page(), headers=headers)


def add_state(app: FastAPI, house: House) -> None:
    """How the server is."""

    @app.get(
        "/health",
        responses=told.answer(told.State) | told.problems(403, 503),
        summary="Whether it lives",
    )
    async def health() -> Response:
        if house.lost:
            text = "too many threads are stuck; the server ends and must be restarted"
            raise Refusal(503, text, reason="lost", headers={"Retry-After": "60"})
        return json_response(as_json({"status": "alive"}))

    @app.get(
        "/ready",
        responses=told.answer(told.State) | told.problems(403, 503),
        summary="Whether to ask it",
    )
    async def ready() -> Response:
        if house.draining:
            raise stopping()
        if house.unable:
            text = "a model cannot answer; the server's log tells why"
            raise Refusal(503, text, reason="unable", headers={"Retry-After": "60"})
        if not house.warm:
            text = "the models are warming up"
            raise Refusal(503, text, reason="warming", headers={"Retry-After": "1"})
        if house.stalled or house.lost:
            text = "the threads that compute answers are stuck"
            raise Refusal(503, text, reason="stuck", headers={"Retry-After": "30"})
        return json_response(as_json({"status": "ready"}))

    @app.get(
        "/metrics",
        responses=told.problems(*told.ASKING) | told.content("For Prometheus.", "text/plain"),
        response_class=Response,
        summary="Numbers about the server",
    )
    async def metrics() -> Response:
        return Response(house.meters.text(), media_type="text/plain; version=0.0.4")


def add_models(app: FastAPI, house: House) -> None:
    """What is served, and pictures to try it with."""
    asked = told.problems(*told.ASKING, 404, 422)

    @app.get(
        "/models",
        responses=told.answer(told.Names) | told.problems(*told.ASKING),
        summary="What is served",
    )
    async def models() -> Response:
        return json_response(as_json({"models": house.shelf.names}))

    @app.get("/model", responses=told.answer(told.ModelTold) | asked, summary="What a model is")
    async def about(model: told.ModelName = None) -> Response:
        served = house.shelf.get(model)
        return await written(lambda: as_json(served.about), len(served.predictor.classes))

    @app.get(
        "/examples",
        responses=told.answer(list[told.ExampleTold]) | asked,
        summary="Pictures to try",
    )
    async def examples(model: told.ModelName = None) -> Response:
        known = house.examples.get(house.shelf.get(model).name, [])
        named = [{"id": str(place), "label": one.label} for place, one in enumerate(known)]
        return json_response(as_json(named))

    @app.get(
        "/examples/{id}",
        responses=asked | told.content("The picture.", *TYPES.values()),
        response_class=Response,
        summary="One of them",
    )
    async def example(id: str, model: told.ModelName = None) -> Response:
        known = house.examples.get(house.shelf.get(model).name, [])
        if not (id.isascii() and id.isdigit() and len(id) < 4 and int(id) < len(known)):
            raise Refusal(404, f"there is no example of that number; there are {len(known)}")
        chosen = known[int(id)]
        return Response(chosen.data, media_type=chosen.media_type)
