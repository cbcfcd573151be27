import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_sets import jpeg, photograph

from vitrail import ConfigError, DataError
from vitrail.data.datasets import Sample
from vitrail.data.loader import (
    EvalSampler,
    Loader,
    TrainSampler,
    balanced_probabilities,
    epoch_order,
    reader_pool,
)
from vitrail.data.preprocessing import Augmentation, preset
from vitrail.data.transforms import EvalTransform, TrainTransform

PREPROCESSING = preset("google", (16, 16))
EVALUATE = EvalTransform(preprocessing=PREPROCESSING)
TRAIN = TrainTransform(preprocessing=PREPROCESSING, augmentation=Augmentation(policy="randaugment"))


def take(steps, **settings):
    return list(islice(TrainSampler(**settings), steps))


def flat(batches):
    return list(chain.from_iterable(batches))


def test_epochs_are_different_permutations():
    batches = take(5, samples=10, batch_size=4)  # 20 keys: two epochs
    epochs = [[key.row for batch in batches for key in batch if key.epoch == e] for e in (0, 1)]
    assert [sorted(rows) for rows in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert take(5, samples=10, batch_size=4, seed=1) != batches == take(5, samples=10, batch_size=4)
    (batch,) = take(1, samples=3, batch_size=8)  # larger than the dataset
    assert [key.epoch for key in batch] == [0, 0, 0, 1, 1, 1, 2, 2]
    with pytest.raises(ConfigError, match="not divisible by 3 processes; try 12"):
        TrainSampler(samples=5, batch_size=10, world_size=3)
    with pytest.raises(ConfigError, match="training set is empty"):
        TrainSampler(samples=0, batch_size=10)


def test_stream_depends_neither_on_start_nor_on_processes():
    settings = {"samples": 13, "batch_size": 8, "seed": 3}
    whole = take(25, **settings)
    for start in (1, 5, 17):
        assert take(25 - start, start_step=start, **settings) == whole[start:]
    for world in (2, 4):
        shares = [take(25, rank=rank, world_size=world, **settings) for rank in range(world)]
        assert [flat(step) for step in zip(*shares, strict=True)] == whole


@pytest.mark.parametrize("samples", [0, 1, 7, 16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_eval_sampler_covers_every_sample_once(samples, world):
    orders = [
        EvalSampler(samples=samples, batch_size=4, rank=rank, world_size=world)
        for rank in range(world)
    ]
    assert sorted(key.row for o in orders for batch in o for key in batch) == list(range(samples))
    assert all([len(rows) for rows in o.batches()] == [len(batch) for batch in o] for o in orders)


def test_uses_of_a_sample_have_their_own_randomness_or_views():
    keys = flat(take(5, samples=5, batch_size=6, repeats=3))  # two epochs of 15
    assert [key.repeat for key in keys] == [0, 1, 2] * 10
    assert all(len({k[:2] for k in keys[start : start + 3]}) == 1 for start in range(0, 30, 3))
    assert sorted(key.row for key in keys[:15]) == sorted([*range(5)] * 3)
    assert len({key.rng(0).random() for key in keys}) == 30
    assert keys[0].rng(0).random() == keys[0].rng(0).random() != keys[0].rng(1).random()
    batches = take(6, samples=4, batch_size=4, views=3)
    draws = [{key.row: key.rng(0).random() for key in batch} for batch in batches]
    assert draws[:3] == draws[3:]
    assert len({draw[0] for draw in draws}) == 3


def test_balanced_sampling_draws_every_class_equally_often():
    class_ids = np.repeat([0, 1, 2], [90, 9, 1])
    order = epoch_order(100, 0, 0, balanced_probabilities(class_ids, 1.0))
    assert (abs(np.bincount(class_ids[order]) - 100 / 3) < 1).all()
    natural = epoch_order(100, 0, 0, balanced_probabilities(class_ids, 0.0))
    assert sorted(natural) == list(range(100))
    half = np.bincount(class_ids[epoch_order(1400, 0, 0, balanced_probabilities(class_ids, 0.5))])
    np.testing.assert_allclose(half / half.sum(), np.sqrt([90, 9, 1]) / 13.487, atol=0.01)
    probabilities = balanced_probabilities(np.array([0] * 9 + [1]), 1.0)
    settings = {"samples": 10, "batch_size": 5, "probabilities": probabilities}
    keys = flat(take(2, **settings))
    assert [key.repeat for key in keys if key.row == 9] == list(range(5))
    assert take(2, start_step=3, **settings) == take(5, **settings)[3:]


class Memory:
    """A dataset of images in a list; None is one that cannot be read."""

    multi_label = in_memory = False
    classes = ("a", "b")

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.images[index] is None:
            raise DataError("it is broken")
        return Sample(self.images[index], index % 2, self.name(index))

    def name(self, index):
        return f"image {index}"


@pytest.fixture(scope="module")
def images():
    return Memory([jpeg(photograph(40, 50, seed)) for seed in range(23)])


def batches(source, count, workers=0, strict=False, **settings):
    order = TrainSampler(**{"samples": 23, "batch_size": 4, "seed": 5} | settings)
    loader = Loader(source, TRAIN, order, seed=5, workers=workers, strict=strict)
    return list(islice(loader, count)), loader


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.slow
def test_resumed_batches_equal_uninterrupted_ones(images):
    whole, _ = batches(images, 20)
    assert whole[0].images.dtype == torch.uint8
    assert whole[0].images.shape == (4, 3, 16, 16)
    for case in range(6):
        rng = random.Random(case)
        step, workers = rng.randrange(19), rng.choice([0, 0, 1, 2])
        late, _ = batches(images, 20 - step, workers, start_step=step)
        assert same(late, whole[step:])
    shares = [batches(images, 5, rank=rank, world_size=2)[0] for rank in range(2)]
    for step, parts in enumerate(zip(*shares, strict=True)):
        assert same([[torch.cat(pair) for pair in zip(*parts, strict=True)]], [whole[step]])


@pytest.mark.slow
def test_unreadable_image_is_replaced_deterministically(images):
    broken = Memory([None if i in (3, 17) else p for i, p in enumerate(images.images)])
    one, loader = batches(broken, 12)
    other, again = batches(broken, 12, workers=2)
    assert same(one, other)
    assert again.skipped == loader.skipped
    assert loader.skipped == {"image 3": "it is broken", "image 17": "it is broken"}
    assert all(len(batch.images) == 4 for batch in one)
    assert not any(3 in batch.indices or 17 in batch.indices for batch in one)


def test_unreadable_images_are_skipped_or_raised(images):
    broken = Memory([None if i in (0, 1, 5) else p for i, p in enumerate(images.images)])
    loader = Loader(broken, EVALUATE, EvalSampler(samples=23, batch_size=2), workers=0)
    seen = [int(index) for batch in loader for index in batch.indices]
    assert seen == [i for i in range(23) if i not in (0, 1, 5)]
    assert sorted(loader.skipped) == ["image 0", "image 1", "image 5"]
    broken = Memory([None, *images.images[1:]])
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"^image 0: it is broken$"):
            batches(broken, 12, workers, strict=True)
    with pytest.raises(DataError, match=r"image \d: it is broken"):  # none is left to replace it
        batches(Memory([None] * 9), 1, samples=9)


def test_multi_label_targets_are_multi_hot(images):
    class Many(Memory):
        multi_label = True

        def __getitem__(self, index):
            return super().__getitem__(index)._replace(label=((), (0,), (0, 1))[index % 3])

    source = Many(images.images[:3])
    (batch,) = Loader(source, EVALUATE, EvalSampler(samples=3, batch_size=3), workers=0)
    assert batch.labels.tolist() == [[0, 0], [1, 0], [1, 1]]


DEADLY = """
import os, signal
from itertools import islice
import numpy as np
from test_loader import EVALUATE, Loader, Memory, TrainSampler
from vitrail.errors import DataError

class Deadly(Memory):
    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

images = Deadly([np.zeros((4, 4, 3), np.uint8)] * 23)
loader = Loader(images, EVALUATE, TrainSampler(samples=23, batch_size=4), workers=1)
try:
    list(islice(loader, 12))
except DataError as error:
    print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_killed_worker_is_reported():
    """In a process of its own: torch watches the dead worker for as long as its parent lives."""
    how = {"capture_output": True, "text": True, "timeout": 120, "cwd": Path(__file__).parent}
    done = subprocess.run([sys.executable, "-c", DEADLY], **how)
    assert done.stdout.startswith("a data loading worker was killed"), done.stderr


def test_pools_use_one_torch_thread_and_leave_others_alone(monkeypatch):
    def threads_of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with reader_pool() as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == threads_of_a_new_thread() == 2
        with ThreadPoolExecutor(4) as makers:  # pools that are started concurrently
            pools = [job.result() for job in [makers.submit(reader_pool) for _ in range(12)]]
        assert threads_of_a_new_thread() == 2
        for pool in pools:
            pool.shutdown()

        no_more = Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr("threading.Thread.start", no_more)
        with pytest.raises(RuntimeError, match="start new thread"):
            reader_pool()  # and no thread is left waiting
        assert torch.get_num_threads() == 2
    finally:
        monkeypatch.undo()
        torch.set_num_threads(usual)
