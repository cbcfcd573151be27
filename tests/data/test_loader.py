import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Thread

import numpy as np
import pytest
import torch
from test_transforms import jpeg, photograph

from vitrail import DataError, create
from vitrail.data.datasets import Sample, open_dataset
from vitrail.data.loader import EvalSampler, Loader, TrainSampler, reader_pool
from vitrail.data.preprocessing import Augmentation, preset
from vitrail.data.transforms import EvalTransform, TrainTransform, normalize

pytestmark = pytest.mark.slow

PREPROCESSING = preset("google", (16, 16))
EVALUATE = EvalTransform(preprocessing=PREPROCESSING)
TRAIN = TrainTransform(preprocessing=PREPROCESSING, augmentation=Augmentation(policy="randaugment"))


class Memory:
    """A source for tests: images in a list; None is one that cannot be read."""

    multi_label = False
    in_memory = False

    def __init__(self, images, classes=("a", "b")):
        self.images = images
        self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.images[index] is None:
            raise DataError("it is broken")
        return Sample(self.images[index], index % 2, self.name(index))

    def name(self, index):
        return f"image {index}"

    def labels(self):
        return np.arange(len(self)) % 2


@pytest.fixture(scope="module")
def images():
    return Memory([jpeg(photograph(40, 50, seed)) for seed in range(23)])


def batches(source, order, count, workers=0, **more):
    loader = Loader(source, TRAIN, order, seed=5, workers=workers, **more)
    return list(islice(loader, count)), loader


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_resumed_batches_equal_uninterrupted_ones(images):
    def order(**more):
        return TrainSampler(samples=23, batch_size=4, seed=5, **more)

    whole, _ = batches(images, order(), 20)
    for case in range(6):
        rng = random.Random(case)
        step, workers = rng.randrange(19), rng.choice([0, 0, 1, 2])
        late, _ = batches(images, order(start_step=step), 20 - step, workers)
        assert same(late, whole[step:])


@pytest.mark.parametrize("world", [2, 4])
def test_batches_are_divided_among_processes(images, world):
    alone, _ = batches(images, TrainSampler(samples=23, batch_size=8, seed=5), 5)
    assert alone[0].images.dtype == torch.uint8
    assert alone[0].images.shape == (8, 3, 16, 16)
    shares = [
        batches(
            images,
            TrainSampler(samples=23, batch_size=8, seed=5, rank=rank, world_size=world),
            5,
        )[0]
        for rank in range(world)
    ]
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([share[step].images for share in shares]), batch.images)
        assert torch.equal(torch.cat([share[step].labels for share in shares]), batch.labels)


def test_unreadable_image_is_replaced_deterministically(images):
    broken = Memory([None if i in (3, 17) else p for i, p in enumerate(images.images)])
    order = TrainSampler(samples=23, batch_size=4, seed=5)
    one, loader = batches(broken, order, 12)
    other, again = batches(broken, order, 12, workers=2)
    assert same(one, other)
    assert loader.skipped == {"image 3": "it is broken", "image 17": "it is broken"}
    assert again.skipped == loader.skipped
    assert all(len(batch.images) == 4 for batch in one)
    assert not any(3 in batch.indices or 17 in batch.indices for batch in one)


def test_training_on_a_folder_with_unreadable_files(tmp_path):
    """5 % of 100 images are broken: a model trains on the others, and they are reported."""
    broken = {
        f"{name}/{i:02d}.jpg" for name, i in (("a", 3), ("a", 40), ("b", 7), ("b", 21), ("b", 49))
    }
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(50):
            data = jpeg(photograph(20, 24, i) // (1 if name == "a" else 4))
            path = tmp_path / name / f"{i:02d}.jpg"
            path.write_bytes(data[:200] if f"{name}/{i:02d}.jpg" in broken else data)
    source = open_dataset(tmp_path, "all")
    model = create("ViT-Mu/4", num_classes=2, image_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    transform = TrainTransform(preprocessing=PREPROCESSING, augmentation=Augmentation())
    order = TrainSampler(samples=len(source), batch_size=20, seed=1)
    loader = Loader(source, transform, order, workers=2)
    for batch in islice(loader, 20):  # four epochs
        loss = torch.nn.functional.cross_entropy(
            model(normalize(batch.images, PREPROCESSING)), batch.labels
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(loader.skipped) == broken
    assert all("JPEG" in reason for reason in loader.skipped.values())
    assert loss.item() < 0.3


def test_strict_raises_at_the_first_unreadable_image(images):
    broken = Memory([None, *images.images[1:]])
    order = TrainSampler(samples=23, batch_size=4, seed=5)
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"^image 0: it is broken$"):
            batches(broken, order, 12, workers=workers, strict=True)
    with pytest.raises(DataError, match=r"image \d: it is broken"):  # none is left to replace it
        batches(Memory([None] * 9), TrainSampler(samples=9, batch_size=4), 1)


def test_evaluation_skips_unreadable_images(images):
    broken = Memory([None if i in (0, 1, 5) else p for i, p in enumerate(images.images)])
    loader = Loader(broken, EVALUATE, EvalSampler(samples=23, batch_size=2), workers=0)
    seen = [int(index) for batch in loader for index in batch.indices]
    assert seen == [i for i in range(23) if i not in (0, 1, 5)]
    assert sorted(loader.skipped) == ["image 0", "image 1", "image 5"]


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
import torch
from vitrail.data.datasets import Sample
from vitrail.data.loader import Loader, TrainSampler
from vitrail.errors import DataError

class Deadly:
    multi_label = in_memory = False
    classes = ("a",)

    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return Sample(np.zeros((4, 4, 3), np.uint8), 0, "")

sampler = TrainSampler(samples=23, batch_size=4)
loader = Loader(Deadly(), lambda data, rng: torch.from_numpy(data), sampler, workers=1)
try:
    list(islice(loader, 12))
except DataError as error:
    print(error, flush=True)
    os._exit(0)
"""


def test_killed_worker_is_reported():
    """In a process of its own: torch watches the dead worker for as long as its parent lives."""
    done = subprocess.run(
        [sys.executable, "-c", DEADLY], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("a data loading worker was killed"), done.stderr


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


def test_pool_threads_use_one_torch_thread(two_cores):
    with reader_pool() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        assert threads_of_a_new_thread() == 2


def test_pools_started_concurrently(two_cores):
    with ThreadPoolExecutor(4) as makers:
        pools = [job.result() for job in [makers.submit(reader_pool) for _ in range(12)]]
    assert threads_of_a_new_thread() == 2
    for pool in pools:
        pool.shutdown()


def test_pool_that_cannot_start_leaves_no_thread_waiting(two_cores, monkeypatch):
    def no_more(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", no_more)
    with pytest.raises(RuntimeError, match="start new thread"):
        reader_pool()
    monkeypatch.undo()
    assert torch.get_num_threads() == 2
