"""Many cells on all cores, one core for each: small models gain little from a second one.

A cell that has its result is not run again. One that was stopped goes on from its last state; so
whatever ends the command, at most some seconds of each cell under way are lost.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from vitrail.data.threads import cores
from vitrail.errors import TrainingError
from vitrail.reproduction.cells import Cell, Result, digest, read_result, run_cell
from vitrail.training.checkpoint import lock_folder
from vitrail.training.memory import configure_malloc

CELLS = "cells"
FIRST_PACE = 25e9  # floating-point operations per second of a core, until a cell has told
BESIDE = 8.0  # seconds of a cell beside its steps: reading, judging, writing

Key = tuple[str | int | float, ...]  # what tells a cell from the others; the last is the seed
Work = Callable[[Cell], float]  # floating-point operations of a cell


@dataclass
class Pace:
    """How long cells take, learned from those that are done."""

    operations: float = 0.0
    seconds: float = 0.0

    def add(self, operations: float, seconds: float) -> None:
        if seconds > BESIDE:
            self.operations += operations
            self.seconds += seconds - BESIDE

    def takes(self, operations: float) -> float:
        """Seconds for a cell of so much work."""
        pace = self.operations / self.seconds if self.seconds else FIRST_PACE
        return BESIDE + operations / pace


@dataclass
class Workshop:
    """Where cells are run, and who is told of it."""

    folder: Path
    workers: int
    work: Work
    tell: Callable[[str, Cell, Result], None]  # a cell is done
    progress: Callable[[int, int, float], None]  # done, of how many, seconds left
    pace: Pace = field(default_factory=Pace)

    def results(self, cells: Mapping[Key, Cell]) -> dict[Key, Result]:
        """The result of each cell; those that have none yet are run."""
        wanted = with_starts({spoken(key): cell for key, cell in cells.items()})
        missing = {key for key in wanted if read_result(self.place(key)) is None}
        if missing:
            with lock_folder(self.folder), self.broken_is_told():
                self.run({key: wanted[key] for key in wanted if key in missing})
        found = {key: read_result(self.place(digest(cell))) for key, cell in cells.items()}
        return {key: result for key, result in found.items() if result is not None}

    def place(self, key: str) -> Path:
        return self.folder / CELLS / key

    def run(self, cells: Mapping[str, tuple[str, Cell]]) -> None:
        """Run cells, given by digest with their names; those that others begin with first."""
        waiting = {key: cell for key, (_, cell) in cells.items()}
        running: dict[Future[bool], str] = {}
        begun: dict[str, float] = {}
        with pool(self.workers) as workers:
            while waiting or running:
                for key in self.ready(waiting, running)[: self.workers - len(running)]:
                    running[workers.submit(run_cell, *self.task(waiting.pop(key), key))] = key
                    begun[key] = time.monotonic()
                rest = [self.pace.takes(self.work(cell)) for cell in waiting.values()]
                for key in running.values():
                    whole = self.pace.takes(self.work(cells[key][1]))
                    rest.append(max(1.0, whole - (time.monotonic() - begun[key])))
                left = max(max(rest), sum(rest) / self.workers)
                self.progress(len(cells) - len(rest), len(cells), left)
                for future in wait(running, timeout=2.0, return_when=FIRST_COMPLETED)[0]:
                    key = running.pop(future)
                    self.finish(future.result(), *cells[key], key)
        self.progress(len(cells), len(cells), 0.0)

    def ready(self, waiting: Mapping[str, Cell], running: Mapping[Future[bool], str]) -> list[str]:
        """Cells that can begin: those whose start is not still to be made, the longest first."""
        missing = {*waiting, *running.values()}
        free = [k for k, c in waiting.items() if c.start is None or digest(c.start) not in missing]
        needed = {digest(c.start) for c in waiting.values() if c.start is not None}
        return sorted(free, key=lambda key: (key not in needed, -self.work(waiting[key])))

    def task(self, cell: Cell, key: str) -> tuple[Cell, Path, str]:
        start = "" if cell.start is None else str(self.place(digest(cell.start)))
        return cell, self.place(key), start

    def finish(self, finished: bool, name: str, cell: Cell, key: str) -> None:
        if not finished:
            raise KeyboardInterrupt
        result = read_result(self.place(key))
        assert result is not None
        self.pace.add(self.work(cell), result.seconds)
        self.tell(name, cell, result)

    @contextmanager
    def broken_is_told(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            raise TrainingError(
                "a process that trained was ended from outside, perhaps for want of memory; the "
                "same command goes on where it stopped, with --workers 1 if need be"
            ) from None


def spoken(key: Key) -> str:
    """`learned, stem, seed 2`"""
    *words, seed = key
    return ", ".join([*map(str, words), f"seed {seed}"])


def with_starts(cells: Mapping[str, Cell]) -> dict[str, tuple[str, Cell]]:
    """Digest → (name, cell) for the cells and all that they begin with."""
    found: dict[str, tuple[str, Cell]] = {}
    for name, cell in cells.items():
        found.setdefault(digest(cell), (name, cell))
        if cell.start is not None:
            for key, one in with_starts({f"{name}: what it begins with": cell.start}).items():
                found.setdefault(key, one)
    return found


# The processes


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores; they stop, and keep their state, when this one does."""
    context = get_context("spawn")
    pids: SimpleQueue[int] = context.SimpleQueue()
    with ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=begin_worker,
        initargs=(max(1, cores() // workers), pids),
    ) as executor:
        try:
            yield executor
        except BaseException:
            while not pids.empty():
                with suppress(ProcessLookupError):
                    os.kill(pids.get(), signal.SIGTERM)  # a run saves its state
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def begin_worker(threads: int, pids: "SimpleQueue[int]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    pids.put(os.getpid())
    torch.set_num_threads(threads)
    if threads > 1:
        configure_malloc()  # the process is here for runs alone
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
