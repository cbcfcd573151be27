"""Prometheus metrics and the request log. Neither contains images, file names or tokens."""

import json
import re
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from vitrail.serving.config import LogFormat

if TYPE_CHECKING:
    from vitrail.serving.limits import Reservation

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CLIENT_CLOSED_REQUEST = 499  # logged status of a client that disconnected; nothing is sent
RECORD = "vitrail.record"  # key of the record in a request's scope
PROCESS_ID, REQUEST_NUMBERS = token_hex(4), count(1)
VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

disable_created_metrics()  # the text format has no place for creation times but extra gauges


class Metrics:
    """The server's metrics in a registry of their own."""

    def __init__(
        self,
        *,
        queue: Callable[[], float],
        in_flight: Callable[[], float],
        stuck: Callable[[], float],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests_total", "Requests.", ("route", "status"), registry=registry
        )
        self.rejected = Counter(
            "vitrail_rejected_total", "Requests rejected.", ("reason",), registry=registry
        )
        self.images = Counter("vitrail_pictures_total", "Images processed.", registry=registry)
        self.unreadable = Counter(
            "vitrail_unreadable_total", "Images that could not be decoded.", registry=registry
        )
        self.request_seconds = Histogram(
            "vitrail_request_seconds",
            "Time from request to end of response.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        stages = Histogram(
            "vitrail_stage_seconds",
            "Time in the queue, preprocessing, and running the model.",
            ("stage",),
            buckets=SECONDS,
            registry=registry,
        )
        self.wait_seconds = stages.labels("wait")
        self.prepare_seconds = stages.labels("prepare")
        self.run_seconds = stages.labels("run")
        self.batch_sizes = Histogram(
            "vitrail_batch_pictures", "Images per batch.", buckets=BATCH_SIZES, registry=registry
        )
        for name, text, read in (
            ("vitrail_queue_pictures", "Images admitted and not yet answered.", queue),
            ("vitrail_requests_in_flight", "Requests in progress.", in_flight),
            ("vitrail_stuck_threads", "Threads beyond the watchdog's limit.", stuck),
        ):
            Gauge(name, text, registry=registry).set_function(read)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


@dataclass(slots=True)
class RequestRecord:
    """A request's log entry, filled in while it is processed, and the memory it has reserved."""

    id: str
    method: str
    route: str = "other"
    status: int = 0
    images: int = 0
    batch: int = 0  # size of the batch that its images were part of
    bytes: int = 0  # of its body
    body_complete: bool = False
    reason: str = ""  # why it was rejected
    start: float = field(default_factory=time.perf_counter)
    reservation: "Reservation | None" = None


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of a request."""
    return scope[RECORD]


def request_id(client_id: str) -> str:
    """Return the client's ID if it is plain and short, else a new one."""
    if client_id and VALID_REQUEST_ID.fullmatch(client_id):
        return client_id
    return f"{PROCESS_ID}-{next(REQUEST_NUMBERS)}"


def log_request(record: RequestRecord, seconds: float, format: LogFormat) -> None:
    """Log a finished request."""
    if format == "json":
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "id": record.id,
                "method": record.method,
                "route": record.route,
                "status": record.status,
                "ms": round(1000 * seconds, 1),
                "pictures": record.images,
                "batch": record.batch,
                "bytes": record.bytes,
            }
        )
    elif format == "text":
        batch = f"  {record.images} of {record.batch}" if record.batch else ""
        line = (
            f"{time.strftime('%H:%M:%S')}  {record.status}  {record.method} {record.route}"
            f"  {1000 * seconds:.0f} ms{batch}  {record.id}"
        )
    else:
        return
    print(line, file=sys.stderr, flush=True)


def log_event(text: str, format: LogFormat) -> None:
    """Log an event of the server itself, whatever the log format."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": text}) if format == "json" else f"vitrail: {text}"
    print(line, file=sys.stderr, flush=True)


def log_exception(id: str, route: str, error: BaseException, format: LogFormat) -> None:
    """Log an internal error with its traceback, whatever the log format."""
    trace = "".join(traceback.format_exception(error))
    line = json.dumps({"id": id, "route": route, "bug": trace})
    print(line if format == "json" else f"{id}: {trace}", file=sys.stderr)
