"""One line for each request: never what a picture shows, what it is called, or a token."""

import json
import re
import sys
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from secrets import token_hex
from typing import Any

from vitrail.serving.settings import Log

GONE = 499  # how a client that hung up is written down; it hears nothing
RECORD = "vitrail.record"  # where a request's scope keeps its record
PROCESS, NUMBERS = token_hex(4), count(1)
PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class Record:
    """What is known of a request while it is under way."""

    id: str
    method: str
    route: str = "other"
    status: int = 0
    pictures: int = 0
    batch: int = 0  # pictures that were looked at together with its own
    bytes: int = 0  # of its body
    whole: bool = False  # all of its body was read
    reason: str = ""  # why it was refused
    begun: float = field(default_factory=time.perf_counter)


def record_of(scope: MutableMapping[str, Any]) -> Record:
    """The record that goes with a request."""
    return scope[RECORD]


def request_id(given: str) -> str:
    """The client's own, if it is plain and short, or a new one."""
    return given if given and PLAIN_ID.fullmatch(given) else f"{PROCESS}-{next(NUMBERS)}"


def write(record: Record, seconds: float, how: Log) -> None:
    """A request that is over."""
    if how == "json":
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "method": record.method,
            "route": record.route,
            "status": record.status,
            "ms": round(1000 * seconds, 1),
            "pictures": record.pictures,
            "batch": record.batch,
            "bytes": record.bytes,
        }
        print(json.dumps(line), file=sys.stderr, flush=True)
    elif how == "text":
        many = f"  {record.pictures} of {record.batch}" if record.batch else ""
        print(
            f"{time.strftime('%H:%M:%S')}  {record.status}  {record.method} {record.route}"
            f"  {1000 * seconds:.0f} ms{many}  {record.id}",
            file=sys.stderr,
            flush=True,
        )


def write_event(text: str, how: Log) -> None:
    """Something about the server itself: always logged."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": text}) if how == "json" else f"vitrail: {text}"
    print(line, file=sys.stderr, flush=True)


def write_bug(record: Record, error: BaseException, how: Log) -> None:
    """A fault of ours: always told, whole."""
    trace = "".join(traceback.format_exception(error))
    told = {"id": record.id, "route": record.route, "bug": trace}
    print(json.dumps(told) if how == "json" else f"{record.id}: {trace}", file=sys.stderr)
