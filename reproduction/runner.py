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
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import torch

from reproduction import inspected, jobs, report, tables, trained
from reproduction.jobs import Datasets, Job, Key, Result, digest
from reproduction.report import Report
from reproduction.results import Results
from vitrail.cli.reproduce import NAMES
from vitrail.data.loader import available_cores
from vitrail.errors import TrainingError
from vitrail.training.checkpoint import lock_folder
from vitrail.training.memory import configure_malloc

INITIAL_SPEED = 25e9  # FLOP/s of a core, until a job has finished
MODULES = vars(tables) | vars(trained) | vars(inspected)
EXPERIMENTS: dict[str, Callable[[Results], Report]] = {name: MODULES[name] for name in NAMES}


def list_jobs(name: str, datasets: Datasets) -> dict[Key, Job]:
    """Return what an experiment trains: its grid of runs, or what its own function lists."""
    own = getattr(trained, f"{name}_jobs", None)
    return own(datasets) if own else jobs.grid_jobs(name, datasets)


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

    def run(self, name: str, datasets: Datasets) -> Report:
        """Run the jobs of an experiment that have no result yet, and write its report."""
        command, given = ["vitrail", "reproduce", name], datasets
        if given.probes:
            shrink = partial(jobs.shrink, folder=self.folder / "images")
            pretrain, *probes = map(shrink, (given.pretrain, *given.probes))
            datasets = replace(given, pretrain=pretrain, probes=tuple(probes))
        listed = list_jobs(name, datasets)
        if listed:
            command += ["--data", Path(given.pretrain).name]
            command += ["--target", Path(given.target).name] if given.target else []
        if given.probes:
            command += ["--probe", *(Path(probe).name for probe in given.probes)]
        for job in {(job.data, job.images, job.half): job for job in listed.values()}.values():
            jobs.open_data(job)  # unusable data fails before the first run
        finished = EXPERIMENTS[name](Results(name, datasets, self.results(listed)))
        finished = replace(finished, command=shlex.join(command))
        report.write(finished, self.folder / name)
        return finished

    def results(self, listed: Mapping[Key, Job]) -> dict[Key, Result]:
        """Return the result of each job; those without one are run."""
        named: dict[str, tuple[str, Job]] = {}
        for (*words, seed), job in listed.items():
            name = ", ".join([*map(str, words), f"seed {seed}"])
            if job.start is not None:
                named.setdefault(digest(job.start), (f"{name}: pre-training", job.start))
            named.setdefault(digest(job), (name, job))
        missing = {key: job for key, job in named.items() if not self.result(key)}
        if missing:
            try:
                with lock_folder(self.folder):
                    self.run_jobs(missing)
            except BrokenProcessPool:
                raise TrainingError(
                    "a training process was killed, perhaps for lack of memory; run the same "
                    "command again to resume, with --workers 1 if necessary"
                ) from None
        return {key: cast(Result, self.result(digest(job))) for key, job in listed.items()}

    def run_jobs(self, named: Mapping[str, tuple[str, Job]]) -> None:
        """Run jobs, given as digest → (name, job): those that others start from, then the longest.

        The remaining time is that of the remaining FLOPs at the speed until now.
        """
        starts = {digest(job.start) for _, job in named.values() if job.start is not None}
        order = sorted(named, key=lambda key: (key not in starts, -named[key][1].flops))
        waiting = {key: named[key][1] for key in order}
        running: dict[Future[bool], str] = {}
        begin = time.monotonic()
        total = left = sum(job.flops for job in waiting.values())
        with process_pool(self.workers) as pool:
            while waiting or running:
                unfinished = {*waiting, *running.values()}
                for key, job in list(waiting.items()):
                    start = self.job_folder(digest(job.start)) if job.start else None
                    if len(running) < self.workers and (not start or start.name not in unfinished):
                        folder = self.job_folder(key)
                        running[pool.submit(jobs.run_job, job, folder, str(start or ""))] = key
                        del waiting[key]
                speed = (total - left) / (time.monotonic() - begin) or INITIAL_SPEED * self.workers
                self.on_progress(len(named) - len(unfinished), len(named), left / speed)
                for future in wait(running, timeout=2.0, return_when=FIRST_COMPLETED)[0]:
                    if not future.result():
                        raise KeyboardInterrupt
                    key = running.pop(future)
                    name, job = named[key]
                    left -= job.flops
                    self.on_result(name, cast(Result, self.result(key)))
        self.on_progress(len(named), len(named), 0.0)

    def result(self, key: str) -> Result | None:
        return jobs.read_result(self.job_folder(key))

    def job_folder(self, key: str) -> Path:
        return self.folder / "jobs" / key


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores; they save a checkpoint and stop when this one does."""
    threads = max(1, available_cores() // workers)
    with ProcessPoolExecutor(workers, get_context("spawn"), init_worker, (threads,)) as executor:
        try:
            yield executor
        except BaseException:
            for process in active_children():
                process.terminate()  # a run saves its checkpoint
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def init_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    torch.set_num_threads(threads)
    if threads > 1:
        configure_malloc()

    def exit_with_parent() -> None:
        cast(BaseProcess, parent_process()).join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
