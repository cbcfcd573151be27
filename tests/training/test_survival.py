"""One writer per folder, orderly stops, and the first bad layer."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from vitrail.errors import DataError
from vitrail.training.checkpoint import first_nonfinite, graceful_stop, lock_folder


def test_two_runs_cannot_write_one_folder(tmp_path):
    with (
        lock_folder(tmp_path / "run"),
        pytest.raises(DataError, match="another run is writing"),
        lock_folder(tmp_path / "run"),
    ):
        pass


def test_a_folder_is_free_again_after_its_writer_was_killed(tmp_path):
    hold = (
        "import sys, pathlib; from vitrail.training.checkpoint import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(DataError), lock_folder(tmp_path):
            pass
        process.kill()
    with lock_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"cannot write into .*choose another folder"),
        lock_folder(tmp_path / "file" / "run"),
    ):
        pass


def test_a_signal_is_a_wish_and_a_second_interrupt_an_order():
    before = signal.getsignal(signal.SIGINT)  # ignored in a background job of a shell
    with graceful_stop() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.signal == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, images, targets):
        return self.model(images).sum()


def test_the_first_layer_with_a_bad_value_is_named():
    chain, images = Chain(), torch.ones(1, 2)
    assert first_nonfinite(chain, images, images) == "the gradients"
    assert first_nonfinite(chain, images / 0, images) == "the images"
    with torch.no_grad():
        chain.model[1].weight.fill_(3e38)
    assert first_nonfinite(chain, images * 100, images) == "the output of 1"
    with torch.no_grad():
        chain.model[2].bias.fill_(torch.nan)
    assert first_nonfinite(chain, images, images) == "the weight 2.bias"
