"""The body of a request → the pictures in it, all in memory, within limits.

A body is the bytes of one picture, or a form (multipart/form-data, RFC 7578) whose fields
`pictures` are files. Nothing in it is ever used as the name of a file here.
"""

import asyncio
from typing import NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from vitrail.serving.logs import Record
from vitrail.serving.refusals import ClientGoneError, Refusal
from vitrail.serving.settings import Limits

FIELD = "pictures"
FORM = "multipart/form-data"
LONGEST_NAME = 200
LONGEST_HEAD = 4096  # bytes of the headers of one part
MOST_OTHER_FIELDS = 16
HOW = (
    f"send the bytes of one picture as image/jpeg or another, or a form with the field {FIELD!r} "
    f"(curl -F {FIELD}=@cat.jpg)"
)


class Upload(NamedTuple):
    """One picture as it came."""

    name: str  # what the client calls it
    data: bytes


def declared_size(request: Request, limits: Limits) -> int:
    """How many bytes may come; too many are refused before any is read."""
    text = request.headers.get("content-length")
    if text is None:
        return limits.body  # in chunks: it may be as long as is allowed
    size = int(text) if text.isascii() and text.isdigit() else limits.body
    if size > limits.body:
        raise too_large(limits)
    return size


def check_type(request: Request) -> None:
    """Refuse what is neither a picture nor a form, before any of it is read."""
    kind = media_type(request)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "a compressed body is not read; send it as it is", reason="type")
    if kind not in ("", FORM, "application/octet-stream") and not kind.startswith("image/"):
        raise Refusal(415, f"{kind[:60]} is not read here; {HOW}", reason="type")


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limits: Limits, record: Record) -> bytes:
    """All of the body, if it comes in time."""
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(limits.timeout):
            while not record.whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunks.append(message.get("body", b""))
                record.bytes += len(chunks[-1])
                record.whole = not message.get("more_body", False)
                if record.bytes > limits.body:
                    raise too_large(limits)
    except TimeoutError:
        text = f"the body did not arrive within {limits.timeout:g} s"
        raise Refusal(408, text, reason="slow", headers={"Connection": "close"}) from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def too_large(limits: Limits) -> Refusal:
    text = f"more than {limits.body:,} bytes; send smaller pictures, or fewer at once"
    return Refusal(413, text, reason="size")


def uploads(request: Request, body: bytes, limits: Limits) -> list[Upload]:
    """The pictures of a body."""
    if media_type(request) == FORM:
        found = form_files(request.headers["content-type"], body, limits)
    else:
        found = [Upload("picture", body)] if body else []
    if not found:
        raise Refusal(400, f"there is no picture in the request; {HOW}", reason="empty")
    return found


def form_files(content_type: str, body: bytes, limits: Limits) -> list[Upload]:
    """The files of the field `pictures`; other fields are passed over."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= 200:
        raise broken("it names no boundary")
    found, others, end = [], 0, b"\r\n--" + boundary
    form = b"\r\n" + body
    place = form.find(end)
    while place >= 0:
        place += len(end)
        if form.startswith(b"--", place):
            return found
        head = form.find(b"\r\n\r\n", place, place + LONGEST_HEAD)
        if not form.startswith(b"\r\n", place) or head < 0:
            raise broken("a part has no headers")
        after = form.find(end, head + 4)
        if after < 0:
            break
        name, filename = disposition(form[place:head])
        if name == FIELD:
            if len(found) == limits.pictures:
                text = f"more than {limits.pictures} pictures; send fewer at once"
                raise Refusal(413, text, reason="size")
            called = filename[:LONGEST_NAME] or f"picture {len(found) + 1}"
            found.append(Upload(called, form[head + 4 : after]))
        elif (others := others + 1) > MOST_OTHER_FIELDS:
            raise broken(f"it has more than {MOST_OTHER_FIELDS} other fields")
        place = after
    raise broken("it ends too early")


def disposition(head: bytes) -> tuple[str, str]:
    """What a part is called, and its file."""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            options = parse_options_header(value.strip())[1]
            name, filename = options.get(b"name", b""), options.get(b"filename", b"")
            return name.decode(errors="replace"), filename.decode(errors="replace")
    raise broken("a part does not say what it is")


def broken(why: str) -> Refusal:
    return Refusal(400, f"the form cannot be read: {why}", reason="form")
