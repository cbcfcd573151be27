"""Threads that prepare pictures, each with one core for itself.

Decoding and resizing let go of Python's lock, so threads share out the work without the cost of
processes: nothing is started, nothing is sent.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reading_threads(count: int) -> ThreadPoolExecutor:
    """A pool in whose threads torch works alone.

    A thread that asks torch for one core decides for all threads begun after it, so all are begun
    here and the number is put back.
    """
    usual = torch.get_num_threads()
    begun = Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="reader", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    begun.wait()
    torch.set_num_threads(usual)
    return pool
