"""Threads that read pictures, each with one core for itself."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch

from vitrail.data.loader import reader_pool


@pytest.fixture
def two_cores():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def threads_of_a_new_thread():
    found = []
    thread = Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_torch_works_alone_in_the_threads_and_as_before_elsewhere(two_cores):
    with reader_pool() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        assert threads_of_a_new_thread() == 2


def test_pools_that_are_made_at_once_do_not_disturb_each_other(two_cores):
    with ThreadPoolExecutor(4) as makers:
        pools = [job.result() for job in [makers.submit(reader_pool) for _ in range(12)]]
    assert threads_of_a_new_thread() == 2
    for pool in pools:
        pool.shutdown()


def test_a_pool_whose_threads_cannot_begin_fails_and_leaves_none_waiting(two_cores, monkeypatch):
    def no_more(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", no_more)
    with pytest.raises(RuntimeError, match="start new thread"):
        reader_pool()
    monkeypatch.undo()
    assert torch.get_num_threads() == 2
