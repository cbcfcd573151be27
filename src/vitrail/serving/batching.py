"""Dynamic batching: one thread runs the model on whatever images are waiting.

Whenever the model is free it takes the waiting images, up to the batch size, and never waits for
more. So a single request is not delayed, and a busy server runs full batches without a timer. All
work that needs the cores (batches, explanations, teaching) goes through this one thread. Work for
disconnected clients is not started.

Images are decoded in other threads, within a shared pixel budget. Decoding and running take turns,
each with all cores: the threads of a matrix product wait for each other, so one that shares its
core with a decoder delays all. An image that delays its batch is left out and joins a later one.

Neither decoders nor matrix products can be interrupted. A stuck batch thread is abandoned: its
requests get an error, another thread takes over, and the late result is dropped. A slow decoder
keeps its thread, and a spare thread is started.
"""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread, current_thread, get_native_id
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decode import open_image
from vitrail.data.loader import MAX_POOL_THREADS, available_cores, start_pool
from vitrail.errors import DataError, VitrailError
from vitrail.prediction.predictor import Prediction, Predictor, decode_logits
from vitrail.serving.config import ServerConfig
from vitrail.serving.metrics import Metrics

if TYPE_CHECKING:
    from vitrail.serving.registry import ServedModel

JOIN_SECONDS = 10.0  # to wait for the batch thread on shutdown
SMOOTHING = 0.2  # weight of the last batch in the throughput
STALL_SECONDS = 0.05  # a batch waits this long for the next decoded image
DEFAULT_BATCH_SIZE = 8
CANDIDATE_SIZES = (1, 2, 4, 8, 16, 32)
NEAR_BEST = 0.99  # of the best throughput: the smallest such batch size is chosen
TUNING_SECONDS = 2.0

BUDGET_IMAGES = 2  # images of the largest allowed size that may be decoded at once
RESERVED_SHARE = 2  # half of the largest image is reserved for small ones
SMALL_SHARE = 16  # small: at most a sixteenth of the largest image
SLOW_SECONDS = 0.25  # at one image, after which a decoding thread gets a spare
MAX_SPARES = 4
NICE = 10  # of threads that decode large images; Linux schedules by thread


# A function of a batch of items that returns a result for each; items of one object are batched
# together. An exception as a result fails that item alone, a future defers it until it is done.
Work: TypeAlias = "ImageWork | SingleWork"


class Job:
    """The items of one request and their results; `done` resolves on the event loop."""

    def __init__(self, work: Work, items: Sequence[Any]) -> None:
        self.work, self.items = work, items
        self.results: list[Any] = [None] * len(items)
        self.remaining = len(items)
        self.batch = 0  # the largest batch that one of its items was part of
        self.submitted = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[list[Any]] = self.loop.create_future()


class Batcher:
    """The queue of jobs and the thread that runs them."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.waiting: deque[tuple[Job, int]] = deque()
        self.changed = Condition()
        self.stopped = False
        self.throughput = 0.0  # images per second, smoothed
        self.batch: list[tuple[Job, int]] = []  # what the thread is working on
        self.batch_start = 0.0  # monotonic clock
        self.abandoned: dict[Thread, float] = {}  # stuck threads, and the start of their batch
        self.thread = Thread(target=self.run, name="batcher", daemon=True)
        self.thread.start()

    def submit(self, work: Work, items: Sequence[Any]) -> Job:
        """Queue items; call it on the event loop."""
        job = Job(work, items)
        with self.changed:
            self.waiting.extend((job, index) for index in range(len(items)))
            self.changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Drop the items of a job that have not started."""
        job.done.cancel()
        if job.remaining:
            with self.changed:
                self.waiting = deque(item for item in self.waiting if item[0] is not job)

    @property
    def batch_seconds(self) -> float:
        """How long the current batch has been running."""
        with self.changed:
            return time.monotonic() - self.batch_start if self.batch else 0.0

    def abandon(self, error: BaseException) -> None:
        """Fail the current batch and replace its thread."""
        with self.changed:
            if not (batch := self.batch):
                return
            self.abandoned[self.thread], self.batch = self.batch_start, []
            self.thread = Thread(target=self.run, name="batcher", daemon=True)
            self.thread.start()
        resolve(dict.fromkeys((job for job, _ in batch), error))

    def stop(self) -> None:
        """End the thread after its current batch."""
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join(JOIN_SECONDS)

    def run(self) -> None:
        while batch := self.take():
            start = time.perf_counter()
            work = batch[0][0].work
            for job, _ in batch:
                self.metrics.wait_seconds.observe(start - job.submitted)
            try:
                results = work([job.items[index] for job, index in batch])
            except Exception as error:
                results = [error] * len(batch)
            with self.changed:
                self.abandoned.pop(current_thread(), None)
                if self.thread is not current_thread():
                    return  # abandoned: the results are dropped
                self.batch = []
            finished: dict[Job, BaseException | None] = {}  # complete and failed jobs
            count = sum(not isinstance(result, Future) for result in results)
            for (job, index), result in zip(batch, results, strict=True):
                if isinstance(result, Future):
                    result.add_done_callback(partial(self.requeue, job, index))
                    continue
                job.batch = max(job.batch, count)
                job.results[index] = result
                job.remaining -= 1
                if isinstance(result, Exception):
                    finished[job] = result
                elif not job.remaining:
                    finished.setdefault(job, None)
            if count and not isinstance(work, SingleWork):
                rate = count / max(time.perf_counter() - start, 1e-6)
                previous = self.throughput or rate
                self.throughput = previous + SMOOTHING * (rate - previous)
                self.metrics.batch_sizes.observe(count)
            resolve(finished)

    def take(self) -> list[tuple[Job, int]]:
        """Wait for items; return the oldest with others of its work, or nothing when stopped."""
        with self.changed:
            while not (self.waiting or self.stopped):
                self.changed.wait()
            if self.stopped:
                return []
            work = self.waiting[0][0].work
            batch, others, size = [], [], work.batch_size
            while self.waiting and len(batch) < size:
                job, index = self.waiting.popleft()
                (batch if job.work is work else others).append((job, index))
            self.waiting.extendleft(reversed(others))
            self.batch, self.batch_start = batch, time.monotonic()
            return batch

    def requeue(self, job: Job, index: int, _: "Future[Any]") -> None:
        """Put a deferred item first in the queue, unless its job was canceled."""
        with self.changed:
            if not job.done.done():
                self.waiting.appendleft((job, index))
                self.changed.notify()


def resolve(finished: dict[Job, BaseException | None]) -> None:
    """Resolve jobs on their event loops, with one call per loop."""

    def set_results(jobs: list[tuple[Job, BaseException | None]]) -> None:
        for job, error in jobs:
            if error is None and not job.done.done():
                job.done.set_result(job.results)
            elif error is not None and not job.done.done():
                job.done.set_exception(error)

    for loop in {job.loop for job in finished}:
        with suppress(RuntimeError):  # the event loop is closed
            jobs = [(job, error) for job, error in finished.items() if job.loop is loop]
            loop.call_soon_threadsafe(set_results, jobs)


# Decoding


@dataclass(slots=True)
class DecodeTask:
    """A function of an encoded image, and the future of its result."""

    data: bytes
    function: Callable[[bytes], Any]
    future: "Future[Any]" = field(default_factory=Future)
    pixels: int | None = None  # once the header is read

    def fail(self, error: BaseException) -> None:
        """Set the exception of the future, which may be canceled."""
        if isinstance(error, VitrailError):  # the frames of its traceback keep the image in memory
            error = type(error)(str(error))
        elif not isinstance(error, Exception):  # an extension's panic
            error = RuntimeError(repr(error))
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class DecodePool:
    """Decoding threads: one per core, spares for slow ones, and a pixel budget for all.

    Large images have their own low-priority threads, so that other images do not wait.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.max_pixels = config, config.max_pixels
        self.free_pixels = BUDGET_IMAGES * config.max_pixels
        self.tasks: SimpleQueue[DecodeTask | None] = SimpleQueue()
        self.parked: list[DecodeTask] = []  # waiting for pixels
        self.lock = Lock()
        self.busy: dict[Thread, float] = {}  # threads at work, and since when
        self.size, self.threads, self.closed = min(available_cores(), MAX_POOL_THREADS), 0, False
        self.add_threads()

    def submit(self, data: bytes, function: Callable[[bytes], Any]) -> "Future[Any]":
        """Call `function` with an encoded image in one of the threads.

        An image of too many pixels raises `DataError` instead.
        """
        task = DecodeTask(data, function)
        self.tasks.put(task)
        return task.future

    def close(self) -> None:
        """End the threads; images that have not started are dropped."""
        self.closed = True
        for _ in range(self.threads):
            self.tasks.put(None)

    def busy_seconds(self) -> list[float]:
        """How long each busy thread has been working on its image."""
        now = time.monotonic()
        with self.lock:
            return [now - start for start in self.busy.values()]

    @property
    def target_size(self) -> int:
        """Threads needed: one per core besides the slow ones, up to the spares."""
        slow = sum(age > SLOW_SECONDS for age in self.busy_seconds())
        return self.size + min(MAX_SPARES, slow)

    def add_threads(self) -> None:
        """Start the threads that are needed and missing."""
        if (missing := self.target_size - self.threads) <= 0 or self.closed:
            return
        try:
            pool = start_pool(missing, torch_threads=1, name="decoder")
        except RuntimeError:  # no more threads available
            if not self.threads:
                raise
            return  # the next call tries again
        with self.lock:
            self.threads += missing
        for _ in range(missing):
            pool.submit(self.run)
        pool.shutdown(wait=False)  # its threads continue until `run` returns

    def run(self) -> None:
        while (task := self.tasks.get()) is not None and not self.closed:
            if not task.future.cancelled():
                try:
                    self.track(self.dispatch, task)
                except BaseException as error:  # fails the request, not the thread
                    task.fail(error)
            del task  # frees the image while this thread waits
            target = self.target_size
            with self.lock:
                if self.threads > target:
                    self.threads -= 1
                    return

    def track(self, function: Callable[[DecodeTask], None], task: DecodeTask) -> None:
        """Call a function while this thread counts as busy."""
        with self.lock:
            self.busy[current_thread()] = time.monotonic()
        try:
            function(task)
        finally:
            with self.lock:
                del self.busy[current_thread()]

    def dispatch(self, task: DecodeTask) -> None:
        """Run a task if the pixel budget allows it; else park it, so that smaller ones go on."""
        if task.pixels is None:
            header = open_image(task.data, max_pixels=self.max_pixels)
            task.pixels = header.height * header.width
        small = task.pixels <= self.max_pixels // SMALL_SHARE
        reserve = 0 if small else self.max_pixels // RESERVED_SHARE  # left for small images
        with self.lock:
            if task.pixels + reserve > self.free_pixels:
                self.parked.append(task)
                return
            self.free_pixels -= task.pixels

        def decode_large() -> None:
            if sys.platform == "linux":  # elsewhere priorities belong to processes
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
            self.track(self.decode, task)

        if small:
            self.decode(task)
        else:  # in its own thread, since a lowered priority cannot be raised again
            try:
                Thread(target=decode_large, name="decoder-large", daemon=True).start()
            except RuntimeError:  # no more threads available
                self.decode(task)

    def decode(self, task: DecodeTask) -> None:
        """Run a task whose pixels are reserved."""
        running = task.future.set_running_or_notify_cancel()
        try:
            result = task.function(task.data) if running else None
        except BaseException as error:
            self.release(task)
            task.fail(error)
        else:
            self.release(task)
            if running:
                task.future.set_result(result)

    def release(self, task: DecodeTask) -> None:
        """Give back the pixels of a task, and let parked tasks try again."""
        assert task.pixels is not None
        with self.lock:
            self.free_pixels += task.pixels
            parked, self.parked = self.parked, []
        for other in parked:
            self.tasks.put(other)


# Work


@dataclass(slots=True)
class ImageItem:
    """One image of a request and its decoding options."""

    name: str
    data: bytes
    top: int = 1
    threshold: float | None = None
    image: "Future[Tensor] | None" = None


class FeatureVector(NamedTuple):
    """The features of one image, or the error if it cannot be read."""

    name: str
    values: np.ndarray | None = None  # (D,)
    error: str = ""


@dataclass(eq=False)
class ImageWork:
    """Decode a batch of images and run `forward` on those that can be read.

    `forward` takes the predictor, images uint8 (B, C, H, W) and their items, and returns a
    `result_type` for each; an unreadable image gets one with its error.
    """

    served: "ServedModel"
    forward: Callable[[Predictor, Tensor, Sequence[ImageItem]], Sequence[Any]]
    result_type: type[Prediction] | type[FeatureVector]

    @property
    def batch_size(self) -> int:
        return self.served.batch_size

    def __call__(self, items: Sequence[ImageItem]) -> list[Any]:
        start, metrics, predictor = time.perf_counter(), self.served.metrics, self.served.predictor
        images: list[Future[Tensor]] = []
        for item in items:
            if item.image is None:
                item.image = self.served.pool.submit(item.data, predictor.preprocess)
            images.append(item.image)
        waiting, before = {*images}, 0
        while waiting and len(waiting) != before:  # as long as some complete
            before = len(waiting)
            waiting = wait(waiting, timeout=STALL_SECONDS).not_done
        results: list[Any] = []
        tensors: dict[int, Tensor] = {}  # of the images that can be read: uint8 (C, H, W)
        for index, image in enumerate(images):
            result: Any
            if not image.done():
                result = image  # deferred
            elif image.cancelled():
                result = CancelledError()  # the client disconnected
            elif isinstance(result := image.exception(), DataError):
                result = self.result_type(name=items[index].name, error=str(result))
            elif result is None:
                tensors[index] = image.result()
            results.append(result)
        decoded = time.perf_counter()
        if tensors:
            batch = torch.stack(list(tensors.values()))  # (B, C, H, W)
            outputs = self.forward(predictor, batch, [items[index] for index in tensors])
            for index, output in zip(tensors, outputs, strict=True):
                results[index] = output
        metrics.prepare_seconds.observe(decoded - start)
        metrics.run_seconds.observe(time.perf_counter() - decoded)
        metrics.images.labels(self.served.name).inc(len(tensors))
        deferred = sum(isinstance(result, Future) for result in results)
        unreadable = len(items) - len(tensors) - deferred
        metrics.unreadable.labels(self.served.name).inc(unreadable)
        return results


def predict_batch(
    predictor: Predictor, images: Tensor, items: Sequence[ImageItem]
) -> list[Prediction]:
    """Run the model once and decode the logits with each request's options."""
    logits = predictor.logits(images)  # (B, K)
    predictions: dict[int, Prediction] = {}
    for top, threshold in {(item.top, item.threshold) for item in items}:
        rows = [i for i, x in enumerate(items) if (x.top, x.threshold) == (top, threshold)]
        selected = logits if len(rows) == len(items) else logits[rows]
        names = [items[row].name for row in rows]
        decoded = decode_logits(
            selected,
            names,
            predictor.metadata,
            top=top,
            threshold=threshold,
            conformal=predictor.conformal,
        )
        predictions |= zip(rows, decoded, strict=True)
    return [predictions[row] for row in range(len(items))]


@dataclass(eq=False)
class SingleWork:
    """A function that runs alone, after its images are decoded."""

    function: Callable[[], Any]
    images: "Sequence[Future[Any]]" = ()
    batch_size = 1

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        pending = [future for future in self.images if not future.done()]
        return pending[:1] or [self.function()]


# Batch size


def tune_batch_size(predictor: Predictor) -> int:
    """Return the smallest batch size with nearly the best throughput; larger ones add latency."""
    deadline, throughput = time.perf_counter() + TUNING_SECONDS, {}
    for size in CANDIDATE_SIZES:
        try:
            run_blank(predictor, size)  # warm up
            times = []
            while len(times) < 3 or (len(times) < 10 and sum(times) < TUNING_SECONDS / 20):
                start = time.perf_counter()
                run_blank(predictor, size)
                times.append(time.perf_counter() - start)
            throughput[size] = size / min(times)
        except (RuntimeError, MemoryError):  # out of memory
            if not throughput:
                raise
            break
        if time.perf_counter() > deadline:
            break
    best = max(throughput.values())
    return next(size for size in throughput if throughput[size] >= NEAR_BEST * best)


def run_blank(predictor: Predictor, size: int) -> int:
    """Run the model on a batch of blank images; return the batch size."""
    shape = predictor.metadata.preprocessing.size
    predictor.logits(torch.zeros(size, predictor.channels, *shape, dtype=torch.uint8))
    return size
