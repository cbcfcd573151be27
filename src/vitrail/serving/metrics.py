"""Prometheus metrics and the request log. Neither contains images, file names or tokens."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from vitrail.serving.config import LogFormat
from vitrail.serving.limits import RequestRecord

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

disable_created_metrics()  # in the text format, each would be an extra gauge


class Metrics:
    """The server's metrics, in a separate Prometheus registry."""

    def __init__(
        self,
        *,
        queue: Callable[[], float],
        in_flight: Callable[[], float],
        stuck: Callable[[], float],
    ) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("vitrail_requests_total", "Requests.", ("route", "status"))
        self.rejected = counter("vitrail_rejected_total", "Requests rejected.", ("reason",))
        labels = ("model", "version", "digest")
        self.models = Gauge("vitrail_model_info", "Always 1.", labels, registry=self.registry)
        self.images = counter("vitrail_pictures_total", "Images processed.", ("model",))
        text = "Images that could not be decoded."
        self.unreadable = counter("vitrail_unreadable_total", text, ("model",))
        text = "Time from request to end of response."
        self.request_seconds = histogram(
            "vitrail_request_seconds", text, ("route",), buckets=SECONDS
        )
        text = "Time in the queue, preprocessing, and running the model."
        stages = histogram("vitrail_stage_seconds", text, ("stage",), buckets=SECONDS)
        self.wait_seconds = stages.labels("wait")
        self.prepare_seconds = stages.labels("prepare")
        self.run_seconds = stages.labels("run")
        self.batch_sizes = histogram(
            "vitrail_batch_pictures", "Images per batch.", buckets=BATCH_SIZES
        )
        for name, text, read in (
            ("vitrail_queue_pictures", "Images admitted and not yet answered.", queue),
            ("vitrail_requests_in_flight", "Requests in progress.", in_flight),
            ("vitrail_stuck_threads", "Threads beyond the watchdog's limit.", stuck),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)
        ProcessCollector(registry=self.registry)


def log_request(record: RequestRecord, seconds: float, format: LogFormat) -> None:
    if format == "off":
        return
    if format == "json":
        status = 200 if record.route == "/ready" else record.status  # 503 is its normal answer
        failed = status >= 500 and record.reason != "stopping"
        level = "error" if failed else "warning" if status >= 400 else "info"
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "level": level,
                "id": record.id,
                "method": record.method,
                "route": record.route,
                "status": record.status,
                "reason": record.reason,
                "ms": round(1000 * seconds, 1),
                "pictures": record.images,
                "batch": record.batch,
                "bytes": record.bytes,
            }
        )
    else:
        batch = f"  {record.images} of {record.batch}" if record.batch else ""
        reason = f"  {record.reason}" if record.reason else ""
        line = (
            f"{time.strftime('%H:%M:%S')}  {record.status}  {record.method} {record.route}"
            f"  {1000 * seconds:.0f} ms{batch}{reason}  {record.id}"
        )
    write_line(line)


def log_event(
    text: str, format: LogFormat, error: BaseException | None = None, *, level: str = "warning"
) -> None:
    """Log an event of the server itself, or a bug with its traceback, whatever the log format."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    values = {"time": now, "level": "error" if error else level, "event": text}
    if error is not None:
        values["bug"] = "".join(traceback.format_exception(error))
        text += f": {values['bug']}"
    line = json.dumps(values) if format == "json" else f"vitrail: {text}"
    write_line(line)


def write_line(line: str) -> None:
    """Write to the log. Requests and the drain continue if that fails."""
    with suppress(OSError):  # a closed terminal, whose SIGHUP starts the drain; a full disk
        print(line, file=sys.stderr, flush=True)
