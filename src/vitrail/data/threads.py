"""Threads that share out work, each with cores for itself.

Decoding, resizing and matrix products let go of Python's lock, so threads share out the work
without the cost of processes: nothing is started, nothing is sent.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock

import torch

MOST = 8  # threads of a pool: a limit on processors by quota does not show in their number
LITTLE = 1_000_000  # numbers
STARTING = Lock()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def cores_for(numbers: int) -> Iterator[None]:
    """Torch works with one core meanwhile if there is little to do, else with all.

    Little things are done before cores have found each other; and a core that has helped looks
    out for more to do for milliseconds, in the way of a thread that needs it.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1 if numbers <= LITTLE else usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def reading_threads() -> ThreadPoolExecutor:
    """A pool, a thread for each core, in which torch works alone."""
    return threads_with_cores(min(cores(), MOST), each=1, name="reader")


def threads_with_cores(count: int, *, each: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, in each of which torch uses so many cores.

    A thread that asks torch for one core decides for all threads begun after it, so all are begun
    here, one pool at a time, and the number is put back.
    """
    begun = Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(each)
        torch.get_num_threads()  # a thread settles on the number when it first asks for it
        begun.wait()

    with STARTING:
        usual = torch.get_num_threads()
        pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin)
        try:
            for _ in range(count):
                pool.submit(int)
            begun.wait()
        except BaseException:  # no more threads can be had: those that are there must not wait
            begun.abort()
            raise
        finally:
            torch.set_num_threads(usual)
    return pool
