"""Answers as JSON, which is made on the event loop only where it is little."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

LITTLE = 500  # numbers or names
ENCODER = json.JSONEncoder(separators=(",", ":"))


def as_json(value: Any) -> bytes:
    return ENCODER.encode(value).encode()


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def written(write: Callable[[], bytes], amount: int = LITTLE + 1) -> Response:
    """A response of JSON with about so many numbers or names in it."""
    return json_response(write() if amount <= LITTLE else await asyncio.to_thread(write))
