"""The application: its routes, its errors, and the guard around them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vitrail import __version__
from vitrail.errors import VitrailError
from vitrail.serving import description as told
from vitrail.serving.guard import OPEN, Guard
from vitrail.serving.house import PLACES, House
from vitrail.serving.reading import add_reading
from vitrail.serving.refusals import ClientGoneError, Refusal, Refused, Silence
from vitrail.serving.sending import ROUTES, Route

OFF: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
TEXTS = {404: "there is nothing here; see /docs", 405: "that is asked in another way; see /docs"}


def make_app(house: House) -> ASGIApp:
    """The application of a house."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(house.warm_up())
        yield
        warming.cancel()

    app = FastAPI(
        title="vitrail",
        version=__version__,
        description=told.ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=OFF,
    )
    add_reading(app, house)
    for route in ROUTES:
        describe(app, route)
    for kind in (Refusal, VitrailError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    if house.settings.token:
        tell_token(app)
    guarded = Guard(Direct(app, house), house)
    if not house.settings.origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=house.settings.origins,
        allow_methods=("GET", "POST"),
        allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def describe(app: FastAPI, route: Route) -> None:
    """Let the OpenAPI file tell of a route."""
    asked = Annotated[route.asked, Query()]

    async def never_called(asked: asked) -> Response:  # type: ignore[valid-type]
        raise NotImplementedError

    app.post(
        route.path,
        name=route.path[1:],
        summary=route.function.__doc__,
        responses=route.answer | told.problems(*told.SENDING),
        response_class=Response,
        openapi_extra={"requestBody": route.body},
    )(never_called)


def tell_token(app: FastAPI) -> None:
    """Let the OpenAPI file tell where a token is asked for."""
    found = app.openapi()
    found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{"token": []}]
    for path in OPEN & found["paths"].keys():
        found["paths"][path]["get"]["security"] = []


class Direct:
    """Calls the routes that pictures are sent to; everything else is the application's."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self.app, self.house = app, house
        self.routes = {route.path: route for route in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        route = self.routes.get(scope["path"]) if posted else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request, bug = Request(scope, receive), None
        with ExitStack() as places:  # until the answer was sent: it is in memory until then
            scope[PLACES] = places
            try:
                asked = route.asked.model_validate(dict(request.query_params))
                response = await route.function(self.house, request, asked)
            except Exception as error:
                places.close()
                response, bug = await answer_error(request, error), error
            await response(scope, receive, send)
        if bug is not None and response.status_code == 500:
            raise bug


async def answer_error(_: Request, error: Exception) -> Response:
    """Every error is one line of JSON."""
    match error:
        case Refusal():
            return Refused(error)
        case ClientGoneError():
            return Silence()
        case VitrailError():
            return Refused(Refusal(422, str(error), reason="impossible"))
        case RequestValidationError() | ValidationError():
            first = error.errors()[0]
            return Refused(Refusal(422, f"{first['loc'][-1]}: {first['msg']}", reason="parameter"))
        case HTTPException():
            text = TEXTS.get(error.status_code, str(error.detail))
            headers = error.headers or {}
            return Refused(Refusal(error.status_code, text, reason="path", headers=headers))
    return Refused(Refusal(500, "something went wrong on the server", reason="bug"))
