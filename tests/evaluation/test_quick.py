import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail import ConfigError, DataError
from vitrail.data.preprocessing import preset
from vitrail.data.samples import Sample
from vitrail.evaluation import passes as module
from vitrail.evaluation.quick import quick_outcome

HOW = preset("google", (4, 4))


class Grays:
    """Pictures of one gray each, which say their class: 0, 1, 2, 0, …; some cannot be read."""

    in_memory = True
    multi_label = False
    classes = ("dark", "middle", "light")

    def __init__(self, length, broken=()):
        self.length = length
        self.broken = broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.broken:
            raise DataError("it is broken")
        pixels = np.full((6, 5, 3), 100 * (index % 3), np.uint8)
        return Sample(pixels, index % 3, self.name(index))

    def name(self, index):
        return f"picture {index}"

    def labels(self):
        return np.arange(self.length) % 3


def look(images):
    """Logits of the brightness: always right, except that light is taken for middle."""
    brightness = images.mean((1, 2, 3)) + 1  # 0, 0.78 or 1.57
    return torch.stack([0.4 - brightness, brightness - 0.4, brightness * 0], 1) * 5


def run(source, predict=look, batch_size=4, **more):
    return quick_outcome(predict, source, HOW, channels=3, batch_size=batch_size, **more)


@pytest.mark.parametrize("batch_size", [1, 4, 11, 64])
def test_every_picture_counts_once(batch_size):
    got = run(Grays(11), batch_size=batch_size)
    assert got.samples == 11
    assert got.confusion is not None
    assert got.confusion.tolist() == [[4, 0, 0], [0, 4, 0], [0, 3, 0]]
    assert got.accuracy == 8 / 11
    assert sorted(m.index for m in got.mistakes) == [2, 5, 8]


def test_pictures_that_cannot_be_read_are_told_and_do_not_count():
    got = run(Grays(11, broken=(0, 1, 2, 3, 5)))
    assert got.samples == 6
    assert got.skipped == {f"picture {n}": "it is broken" for n in (0, 1, 2, 3, 5)}


def test_strict_stops_at_a_picture_that_cannot_be_read():
    with pytest.raises(DataError, match="picture 5: it is broken"):
        run(Grays(11, broken=(5,)), strict=True)


def test_a_source_without_readable_pictures_is_an_error():
    with pytest.raises(DataError, match="none of 2 pictures could be read: picture 0: it is"):
        run(Grays(2, broken=(0, 1)))


def test_a_model_of_other_classes_is_refused():
    with pytest.raises(ConfigError, match=r"gives \(7,\) numbers .* has 3 classes"):
        run(Grays(3), lambda images: torch.zeros(len(images), 7))


def test_no_gradients_are_kept():
    weight = torch.ones(1, requires_grad=True)
    seen = []
    run(Grays(3), lambda images: seen.append(weight * 2) or look(images))
    assert not seen[0].requires_grad


def test_progress_goes_to_the_end():
    told = []
    run(Grays(11, broken=(2,)), progress=lambda *numbers: told.append(numbers))
    assert told == [(4, 11), (8, 11), (11, 11)]


@pytest.mark.parametrize("broken", [(), (1, 3), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
def test_all_processes_call_the_model_equally_often(monkeypatch, broken):
    """Nine pictures in pairs over two processes: three batches and two."""
    calls = []
    monkeypatch.setattr(module.distributed, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(module.distributed, "rank", lambda rank=rank: rank)
        shapes = []
        calls.append(shapes)
        try:
            run(Grays(9, broken), lambda x, s=shapes: s.append(x.shape[1:]) or look(x), 2)
        except DataError:
            assert len(broken) == 9
    assert [len(shapes) for shapes in calls] == [3, 3]
    assert {tuple(shape) for shapes in calls for shape in shapes} == {(3, 4, 4)}


TWO = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[1])
from test_quick import Grays, look, run
from vitrail import DataError
from vitrail.distributed import exit_process

dist.init_process_group("gloo")
dist.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
fully_shard(model[1]); fully_shard(model)
got = run(Grays(9, (1, 3)), model, 2)  # the second process reads nothing of its first pair
model(torch.ones(2, 3, 4, 4)).sum().backward()  # what was gathered can be learned from
try:
    run(Grays(9, (4,)), model, 2, strict=True)
except DataError as error:
    stopped = str(error)
values = (got.samples, got.accuracy, got.confusion.tolist())
print(values, [m.index for m in got.mistakes], sorted(got.skipped), stopped, got.loss, flush=True)
dist.destroy_process_group()
exit_process(0)
"""


def test_two_processes_with_half_a_model_each_find_what_one_finds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", TWO, str(Path(__file__).parent)]
    both = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=200) for process in both]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    alone = run(Grays(9, (1, 3)), model, 9)
    assert alone.confusion is not None
    values = (alone.samples, alone.accuracy, alone.confusion.tolist())
    mistakes = [m.index for m in alone.mistakes]
    line = f"{values} {mistakes} {sorted(alone.skipped)} picture 4: it is broken"
    for out, errors in told:
        found, _, loss = out.rpartition(" ")
        assert found == line, errors
        assert float(loss) == pytest.approx(alone.loss, abs=1e-6)
