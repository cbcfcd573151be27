"""Runs the jobs of experiments on all cores, one core each, and writes the reports.

Finished jobs are not run again. Interrupted ones resume from their last checkpoint, so at most some
seconds of each running job are lost.
"""

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from reproduction import inspected, report, tables, trained
from reproduction.jobs import (
    Datasets,
    Job,
    Key,
    Result,
    digest,
    grid_jobs,
    open_data,
    read_result,
    run_job,
    shrink,
)
from reproduction.report import Report
from reproduction.results import Results
from vitrail.data.loader import available_cores
from vitrail.data.storage import write_atomic
from vitrail.errors import TrainingError
from vitrail.training.checkpoint import lock_folder
from vitrail.training.memory import configure_malloc

JOBS = "cells"  # the folder's name in 0.1, so that earlier results are reused
INITIAL_SPEED = 25e9  # FLOP/s of a core, until a job has finished
OVERHEAD = 8.0  # seconds of a job besides its steps: reading, evaluating, writing


REPORTS = (
    *(tables.table1, tables.table2, trained.figure3, trained.figure4, trained.figure5),
    *(tables.table5, tables.table6, inspected.figure6, inspected.figure7, trained.transfer),
    *(trained.selfsupervised, trained.figure8, trained.heads, trained.table8),
    *(inspected.figure10, inspected.figure11),
)
EXPERIMENTS: dict[str, Callable[[Results], Report]] = {make.__name__: make for make in REPORTS}


def list_jobs(name: str, datasets: Datasets) -> dict[Key, Job]:
    """Return what an experiment trains: its grid of runs, or what its own function lists."""
    own = getattr(trained, f"{name}_jobs", None)
    return own(datasets) if own else grid_jobs(name, datasets)


class Runner:
    """Runs experiments in a folder."""

    def __init__(
        self,
        folder: Path,
        workers: int | None = None,
        *,
        on_result: Callable[[str, Result], None] = lambda name, result: None,
        on_progress: Callable[[int, int, float], None] = lambda done, total, seconds: None,
    ) -> None:
        self.folder, self.workers = folder, workers or available_cores()
        self.on_result, self.on_progress = on_result, on_progress
        self.flops = self.seconds = 0.0  # of finished jobs: their speed predicts the others

    def run(self, name: str, datasets: Datasets) -> Report:
        """Run the jobs of an experiment that have no result yet, and write its report."""
        command, originals = ["vitrail", "reproduce", name], datasets
        if datasets.probes:
            small = self.folder / "images"
            pretrain, *probes = (
                shrink(data, small) for data in (originals.pretrain, *originals.probes)
            )
            datasets = replace(originals, pretrain=pretrain, probes=tuple(probes))
        jobs = list_jobs(name, datasets)
        if jobs:
            command += ["--data", Path(originals.pretrain).name]
            command += ["--target", Path(datasets.target).name] if datasets.target else []
        if datasets.probes:
            command += ["--probe", *(Path(probe).name for probe in originals.probes)]
        for job in {(job.data, job.images, job.half): job for job in jobs.values()}.values():
            open_data(job)  # unusable data fails before the first run
        finished = EXPERIMENTS[name](Results(name, datasets, self.results(jobs)))
        finished = replace(finished, command=shlex.join(command))
        report.write(finished, self.folder / name)
        return finished

    def write_docs(self, folder: Path) -> Path:
        """Write README.md and its figures from all reports of the folder."""
        reports = [report.read(self.folder / name) for name in EXPERIMENTS]
        reports = [one for one in reports if one is not None]
        for one in reports:
            report.write_figures(one, folder / "figures")
        write_atomic(folder / "README.md", report.markdown(reports))
        return folder / "README.md"

    def results(self, jobs: Mapping[Key, Job]) -> dict[Key, Result]:
        """Return the result of each job; those without one are run."""
        named = with_starts({job_name(key): job for key, job in jobs.items()})
        missing = {
            key: job for key, job in named.items() if read_result(self.job_folder(key)) is None
        }
        if missing:
            try:
                with lock_folder(self.folder):
                    self.run_jobs(missing)
            except BrokenProcessPool:
                raise TrainingError(
                    "a training process was killed, perhaps for lack of memory; run the same "
                    "command again to resume, with --workers 1 if necessary"
                ) from None
        results = {key: read_result(self.job_folder(digest(job))) for key, job in jobs.items()}
        return {key: result for key, result in results.items() if result is not None}

    def run_jobs(self, jobs: Mapping[str, tuple[str, Job]]) -> None:
        """Run jobs, given as digest → (name, job)."""
        waiting = {key: job for key, (_, job) in jobs.items()}
        running: dict[Future[bool], str] = {}
        started: dict[str, float] = {}
        with process_pool(self.workers) as pool:
            while waiting or running:
                for key in self.ready(waiting, running)[: self.workers - len(running)]:
                    job, start = waiting.pop(key), ""
                    if job.start is not None:
                        start = str(self.job_folder(digest(job.start)))
                    running[pool.submit(run_job, job, self.job_folder(key), start)] = key
                    started[key] = time.monotonic()
                rest = [self.estimate(job.flops) for job in waiting.values()]
                for key in running.values():
                    whole = self.estimate(jobs[key][1].flops)
                    rest.append(max(1.0, whole - (time.monotonic() - started[key])))
                remaining = max(max(rest), sum(rest) / self.workers)
                self.on_progress(len(jobs) - len(rest), len(jobs), remaining)
                for future in wait(running, timeout=2.0, return_when=FIRST_COMPLETED)[0]:
                    self.finish(future, *jobs[running[future]], running.pop(future))
        self.on_progress(len(jobs), len(jobs), 0.0)

    def ready(self, waiting: Mapping[str, Job], running: Mapping[Future[bool], str]) -> list[str]:
        """Return jobs whose start is finished: those that others start from, then the longest."""
        missing = {*waiting, *running.values()}
        free = [k for k, j in waiting.items() if j.start is None or digest(j.start) not in missing]
        starts = {digest(job.start) for job in waiting.values() if job.start is not None}
        return sorted(free, key=lambda key: (key not in starts, -waiting[key].flops))

    def finish(self, future: Future[bool], name: str, job: Job, key: str) -> None:
        if not future.result():
            raise KeyboardInterrupt
        result = read_result(self.job_folder(key))
        assert result is not None
        if result.seconds > OVERHEAD:
            self.flops += job.flops
            self.seconds += result.seconds - OVERHEAD
        self.on_result(name, result)

    def estimate(self, flops: float) -> float:
        """Return the expected seconds of a job."""
        return OVERHEAD + flops / (self.flops / self.seconds if self.seconds else INITIAL_SPEED)

    def job_folder(self, key: str) -> Path:
        return self.folder / JOBS / key


def job_name(key: Key) -> str:
    """`learned, stem, seed 2`"""
    *words, seed = key
    return ", ".join([*map(str, words), f"seed {seed}"])


def with_starts(jobs: Mapping[str, Job]) -> dict[str, tuple[str, Job]]:
    """Return digest → (name, job) for jobs and all that they start from."""
    named: dict[str, tuple[str, Job]] = {}
    for name, job in jobs.items():
        named.setdefault(digest(job), (name, job))
        if job.start is not None:
            for key, start in with_starts({f"{name}: pre-training": job.start}).items():
                named.setdefault(key, start)
    return named


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores; they save a checkpoint and stop when this one does."""
    context = get_context("spawn")
    pids: SimpleQueue[int] = context.SimpleQueue()
    with ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=init_worker,
        initargs=(max(1, available_cores() // workers), pids),
    ) as executor:
        try:
            yield executor
        except BaseException:
            while not pids.empty():
                with suppress(ProcessLookupError):
                    os.kill(pids.get(), signal.SIGTERM)  # a run saves its checkpoint
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def init_worker(threads: int, pids: "SimpleQueue[int]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    pids.put(os.getpid())
    torch.set_num_threads(threads)
    if threads > 1:
        configure_malloc()
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
