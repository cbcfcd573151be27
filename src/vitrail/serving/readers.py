"""Threads that decode images, apart from the batch thread, within a shared pixel budget.

A decoder cannot be interrupted. An image that takes long keeps its thread, and a spare thread takes
over from it, so that only its own request waits; the surplus thread ends when the image is done.
Large images have threads of their own with a low priority, so that ordinary ones do not wait.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, get_native_id
from typing import Any

from vitrail.data.decode import open_image
from vitrail.data.loader import MAX_POOL_THREADS, available_cores, start_pool

BUDGET_IMAGES = 2  # times the pixels of the largest allowed image, decoded at once
RESERVE = 2  # a half of the largest image, which only small ones may use
SMALL = 16  # at most a sixteenth of the largest image
SLOW = 0.25  # seconds at one image after which a thread gets a spare
MAX_SPARES = 4
NICE = 10  # of threads for large images, which Linux schedules by thread


@dataclass(slots=True)
class Job:
    """A function of an encoded image, and the future of its result."""

    data: bytes
    function: Callable[[bytes], Any]
    future: "Future[Any]" = field(default_factory=Future)
    pixels: int | None = None  # once its header is read


class Readers:
    """A pool of decoding threads, one per core and spares for slow ones."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.free_pixels = BUDGET_IMAGES * max_pixels
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.parked: list[Job] = []  # until there are pixels for them
        self.change = Lock()
        self.busy: dict[Thread, float] = {}  # since when each thread works on its image
        self.count, self.threads, self.closed = min(available_cores(), MAX_POOL_THREADS), 0, False
        self.start(self.count)

    def start(self, count: int) -> None:
        with self.change:
            self.threads += count
        pool = start_pool(count, torch_threads=1, name="reader")
        for _ in range(count):
            pool.submit(self.run)
        pool.shutdown(wait=False)  # its threads go on until `run` returns

    def submit(self, data: bytes, function: Callable[[bytes], Any]) -> "Future[Any]":
        """Call `function` with an encoded image in one of the threads."""
        job = Job(data, function)
        self.jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the threads; images that have not begun are dropped."""
        self.closed = True
        for _ in range(self.threads):
            self.jobs.put(None)

    def seconds(self) -> list[float]:
        """How long each busy thread has been working on its image."""
        now = time.monotonic()
        with self.change:
            return [now - since for since in self.busy.values()]

    def stalled(self, seconds: float) -> bool:
        """Whether every thread, spares included, has been at the same image for so long."""
        return sum(age > seconds for age in self.seconds()) >= self.count + MAX_SPARES

    def add_spares(self) -> None:
        """Keep one thread per core available beside the slow ones."""
        slow = min(MAX_SPARES, sum(age > SLOW for age in self.seconds()))
        if (missing := self.count + slow - self.threads) > 0 and not self.closed:
            self.start(missing)

    def run(self) -> None:
        while (job := self.jobs.get()) is not None and not self.closed:
            if not job.future.cancelled():
                with self.change:
                    self.busy[current_thread()] = time.monotonic()
                self.decode(job)
                with self.change:
                    del self.busy[current_thread()]
            del job  # and the image with it, while this thread waits for another
            if self.is_surplus():
                return

    def is_surplus(self) -> bool:
        """Whether this thread can end, because slow ones have come back."""
        slow = min(MAX_SPARES, sum(age > SLOW for age in self.seconds()))
        with self.change:
            surplus = self.threads > self.count + slow
            self.threads -= surplus
        return surplus

    def decode(self, job: Job) -> None:
        """Run a job if the pixel budget allows it; else park it, so that smaller images go on."""
        if job.pixels is None:
            job.pixels = self.pixels(job.data)
        small = job.pixels <= self.max_pixels // SMALL
        reserve = 0 if small else self.max_pixels // RESERVE  # for small ones, which need it only
        with self.change:
            if job.pixels + reserve > self.free_pixels:
                self.parked.append(job)
                return
            self.free_pixels -= job.pixels
        if small:
            self.finish(job)
        else:
            Thread(target=self.decode_large, args=(job,), name="large reader", daemon=True).start()

    def decode_large(self, job: Job) -> None:
        """Run a job in a thread of its own, since its priority cannot be raised again."""
        if sys.platform == "linux":  # elsewhere priorities are those of processes
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
        with self.change:
            self.busy[current_thread()] = time.monotonic()
        try:
            self.finish(job)
        finally:
            with self.change:
                del self.busy[current_thread()]

    def finish(self, job: Job) -> None:
        """Run a job whose pixels are reserved, and give them back."""
        assert job.pixels is not None
        result, error = None, None
        wanted = job.future.set_running_or_notify_cancel()
        try:
            result = job.function(job.data) if wanted else None
        except Exception as caught:
            error = caught
        with self.change:
            self.free_pixels += job.pixels
            parked, self.parked = self.parked, []
        for other in parked:
            self.jobs.put(other)
        if error is not None:
            job.future.set_exception(error)
        elif wanted:
            job.future.set_result(result)

    def pixels(self, data: bytes) -> int:
        """Pixels of an image by its header; 0 if it will be refused without being decoded."""
        try:
            image = open_image(data, max_pixels=self.max_pixels)
        except Exception:  # the job will meet the same error, and report it
            return 0
        return image.height * image.width
