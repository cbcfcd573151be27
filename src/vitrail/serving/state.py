"""What the routes share: models, batcher, admission, metrics, and the server's health."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

from vitrail.prediction.predictor import Predictor
from vitrail.probing.memory import Memory
from vitrail.serving.batching import (
    Batcher,
    DecodePool,
    ImageItem,
    SingleWork,
    Work,
    run_blank,
    tune_batch_size,
)
from vitrail.serving.config import ServerConfig
from vitrail.serving.limits import (
    AdmissionController,
    ApiError,
    ClientDisconnectedError,
    Upload,
    check_headers,
    parse_uploads,
    read_body,
)
from vitrail.serving.metrics import Metrics, log_event, log_exception, record_of
from vitrail.serving.registry import Example, ModelRegistry, ServedModel, find_examples

POLL_SECONDS = 0.25  # after which a disconnect of the client is watched for
LARGE_FORM = 2**18  # bytes of a form that is parsed in a thread
MAX_STUCK_THREADS = 3  # with as many, the process must be restarted
MAX_STUCK_TIME = 5  # times the watchdog's limit; one thread stuck for so long needs it, too


class AppState:
    """What the routes share: models, batcher, admission, metrics, and the server's health."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.limits = config, config.limits
        self.batcher = Batcher()
        self.admission = AdmissionController(self.limits, lambda: self.batcher.throughput)
        self.in_flight = 0
        self.metrics = self.batcher.metrics = Metrics(
            queue=lambda: self.admission.images,
            in_flight=lambda: self.in_flight,
            stuck=lambda: len(self.stuck_seconds),
        )
        self.pool = DecodePool(self.limits)
        self.registry = ModelRegistry()
        self.examples: dict[str, list[Example]] = {}
        self.teach_folders: dict[str, Path | None] = {}
        self.warm = self.warm_up_failed = self.draining = False
        self.unrecoverable = False  # so many threads are stuck that only a restart helps

    def add_model(self, name: str, predictor: Predictor, memory: Memory | None = None) -> None:
        self.registry.set(ServedModel(name, predictor, self.pool, self.metrics, memory=memory))

    async def warm_up(self) -> None:
        """Run every model once, tune its batch size if none is set, and find example images."""
        models = list(self.registry.models.values())
        results = [await self.warm_up_model(served) for served in models]
        self.warm, self.warm_up_failed = all(results), not all(results)
        for name, served in list(self.registry.models.items()):
            if name not in self.examples:
                metadata, data = served.predictor.metadata, self.config.examples
                self.examples[name] = await asyncio.to_thread(find_examples, metadata, data)

    async def warm_up_model(self, served: ServedModel) -> bool:
        """Return whether the model can run; errors are logged."""
        size, predictor = self.config.batch_size, served.predictor
        full = partial(run_blank, predictor, size) if size else partial(tune_batch_size, predictor)
        for attempt in (full, partial(run_blank, predictor, 1)):
            try:
                (batch_size,) = await self.batcher.submit(SingleWork(attempt), [None]).done
            except Exception as error:
                log_exception("warm-up", served.name, error, self.config.log)
            else:
                if attempt is full:  # else the default is as good as any
                    served.batch_size = batch_size
                return True
        return False

    @property
    def is_stalled(self) -> bool:
        """Whether stuck threads keep every request from being answered in time."""
        seconds = self.limits.timeout
        return self.batcher.batch_seconds > seconds or self.pool.is_stalled(seconds)

    @property
    def stuck_seconds(self) -> list[float]:
        """The time at the same work of each thread beyond the watchdog's limit."""
        now = time.monotonic()
        seconds = [now - start for start in list(self.batcher.abandoned.values())]
        seconds += [self.batcher.batch_seconds, *self.pool.busy_seconds()]
        return [age for age in seconds if age > self.config.watchdog]

    def check_threads(self) -> bool:
        """Replace stuck threads; return whether the process must be restarted."""
        limit = self.config.watchdog
        self.pool.add_spares()
        if self.batcher.batch_seconds > limit and (self.warm or self.warm_up_failed):
            text = f"the work took longer than {limit:g} s and was abandoned"
            log_event(f"{text}; another thread takes over", self.config.log)
            self.batcher.abandon(ApiError(503, text, reason="stuck"))
        if not self.unrecoverable:
            stuck = self.stuck_seconds
            longest = max(stuck, default=0)
            self.unrecoverable = len(stuck) >= MAX_STUCK_THREADS or longest > MAX_STUCK_TIME * limit
            if self.unrecoverable:
                text = f"{len(stuck)} threads are stuck, for up to {longest:.0f} s; shutting down"
                log_event(text, self.config.log)
        return self.unrecoverable

    def close(self) -> None:
        """Stop the threads."""
        self.batcher.stop()
        self.pool.close()

    async def receive(self, request: Request, *, heavy: bool = False) -> list[Upload]:
        """Admit a request and read its images; the middleware releases the reservation."""
        record = record_of(request.scope)
        size = check_headers(request, self.limits)
        reservation = record.reservation = self.admission.reserve(size, heavy=heavy)
        body = await read_body(request, self.limits, record)
        if len(body) > LARGE_FORM:
            uploads = await asyncio.to_thread(parse_uploads, request, body, self.limits)
        else:
            uploads = parse_uploads(request, body, self.limits)
        reservation.resize(len(uploads))
        record.images = len(uploads)
        return uploads

    async def run(self, request: Request, work: Work, items: Sequence[Any]) -> list[Any]:
        """Run work on items; give up on timeout or when the client disconnects."""
        job = self.batcher.submit(work, items)
        seconds = self.limits.timeout
        try:
            await asyncio.wait([job.done], timeout=min(POLL_SECONDS, seconds))
            if not job.done.done():
                await wait_while_connected(request, job.done, seconds - POLL_SECONDS)
            record_of(request.scope).batch = job.batch if work.batch_size > 1 else 0
            if job.done.done():
                return job.done.result()
            raise ApiError(504, f"no result within {seconds:g} s", reason="timeout")
        finally:
            self.batcher.cancel(job)
            for item in items:
                if isinstance(item, ImageItem) and item.image is not None:
                    item.image.cancel()

    async def run_heavy(
        self, request: Request, function: Callable[[], Any], images: "Sequence[Future[Any]]"
    ) -> Any:
        """Run a function alone, after its images are decoded."""
        try:
            (result,) = await self.run(request, SingleWork(function, images), [None])
        finally:
            for image in images:
                image.cancel()
        return result


async def wait_while_connected(
    request: Request, done: "asyncio.Future[list[Any]]", seconds: float
) -> None:
    """Wait for a result or a timeout; raise if the client disconnects first."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not done.done():
        message = asyncio.ensure_future(request.receive())
        try:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait([done, message], timeout=left, return_when="FIRST_COMPLETED")
            if done.done() or not message.done():
                return
            if message.result()["type"] == "http.disconnect":
                raise ClientDisconnectedError
        finally:
            message.cancel()
            with suppress(asyncio.CancelledError):
                await message
