"""Jobs and the runner: each job runs once, resumes, and is shared between experiments."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reproduction import jobs as module
from reproduction.jobs import PROBE, RESULT, Job, digest, open_data, read_result, run_job, shrink
from reproduction.runner import Runner
from tiny_runs import SETTINGS, Recorder, write_colors
from vitrail.errors import ConfigError, DataError
from vitrail.training.checkpoint import has_state
from vitrail.training.config import ModelSettings, Settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return str(write_colors(tmp_path_factory.mktemp("colors") / "colors.npz", train=60, test=24))


@pytest.fixture
def job(colors):
    return Job(data=colors, settings=SETTINGS)


def changed(job, **changes):
    return replace(job, settings=replace(job.settings, **changes))


def test_equal_jobs_run_once_and_starts_run_first(job, tmp_path):
    fine = replace(job.settings, model=ModelSettings(), seed=1)
    jobs = {
        ("first", 0): job,
        ("same", 0): replace(job),
        ("fine", 1): replace(job, settings=fine, start=job, images=30),
    }
    names, progress = [], []
    calls = {"on_result": lambda name, result: names.append(name)}
    calls["on_progress"] = lambda *state: progress.append(state)
    runner = Runner(tmp_path, 2, **calls)
    results = runner.results(jobs)
    assert runner.results(jobs) == results  # not run again
    assert names == ["first, seed 0", "fine, seed 1"]
    assert results["first", 0] == results["same", 0]
    assert len(list((tmp_path / "jobs").iterdir())) == 2
    assert progress[0][:2] == (0, 2)
    assert progress[0][2] > 0
    tuned = results["fine", 1]
    assert 0 <= tuned.accuracy <= 1
    assert 0 <= tuned.fewshot <= 1
    assert tuned.images == SETTINGS.steps * SETTINGS.batch_size
    assert (tuned.folder / "model.safetensors").exists()


def test_digest_depends_on_everything(job, tmp_path):
    more = str(write_colors(tmp_path / "more.npz", train=63, test=24))
    other_test = str(write_colors(tmp_path / "test.npz", train=60, test=27))
    changes = [{"data": other_test}, {"data": more}, {"images": 30}, {"test_images": 6}]
    changes += [{"start": job}, {"start": changed(job, seed=1)}]
    others = [replace(job, **change) for change in changes]
    others += [changed(job, seed=1), changed(job, steps=9)]
    assert len({digest(one) for one in [job, *others]}) == len(others) + 1
    assert digest(job) == digest(replace(job))
    # A new setting must not make finished runs unknown while it is not set: see `ADDED`.
    default = replace(job, data="builtin:sign-digits", settings=Settings())
    assert digest(default) == "9bada90073be95ed"
    assert digest(changed(default, model=ModelSettings(registers=1))) != digest(default)


def test_subsets_are_nested_and_depend_on_the_seed(job):
    def names(count, seed=0):
        train = open_data(changed(replace(job, images=count), seed=seed)).train
        return {train.name(index) for index in range(len(train))}

    assert len(names(12)) == 12
    assert names(12) < names(30)
    assert names(30) != names(30, seed=1)
    assert len(names(None)) == 60


def test_unusable_data_is_refused(job, tmp_path):
    with pytest.raises(ConfigError, match="2 images are fewer than 3 classes"):
        open_data(replace(job, images=2))
    alone = write_colors(tmp_path / "alone.npz")
    with np.load(alone) as arrays:
        np.savez(alone, **{key: arrays[key] for key in ("x_train", "y_train", "class_names")})
    with pytest.raises(DataError, match="has no test split"):
        open_data(replace(job, data=str(alone)))


def test_a_job_killed_before_its_evaluation_is_only_evaluated(job, tmp_path):
    assert run_job(job, tmp_path / "run")
    first = read_result(tmp_path / "run")
    (tmp_path / "run" / RESULT).unlink()
    weights = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    assert read_result(tmp_path / "run") is None
    assert run_job(job, tmp_path / "run")
    assert read_result(tmp_path / "run") == first
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == weights


def test_half_of_the_classes_is_a_dataset_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", 24), ("test", 12)):
        labels = np.arange(count) % 4
        pixels = rng.integers(0, 250, (count, 8, 8, 3)).astype(np.uint8)
        pixels[:, 0, 0, 0] = labels
        parts |= {f"x_{split}": pixels, f"y_{split}": labels}
    np.savez(tmp_path / "four.npz", **parts, class_names=np.array(list("abcd")))
    whole = Job(data=str(tmp_path / "four.npz"), settings=SETTINGS)
    for half, classes, first in (("even", ("a", "c"), 0), ("odd", ("b", "d"), 1)):
        data = open_data(replace(whole, half=half))
        for samples, count in ((data.train, 12), (data.held_out["test"], 6)):
            assert samples.classes == classes
            assert len(samples) == count
            for sample in samples:
                assert sample.data[0, 0, 0] == 2 * sample.label + first
    assert digest(replace(whole, half="odd")) != digest(replace(whole, half="even"))


def test_the_probe_is_evaluated_on_other_images_than_it_is_fitted_to(job):
    test = open_data(job).held_out["test"]
    pool, rest = module.probe_split(test)
    assert (len(pool), len(rest)) == (8, len(test) - 8)
    names = {pool.name(index) for index in range(8)}
    assert not names & {rest.name(index) for index in range(len(rest))}


def test_probes_compare_models_on_other_datasets(job, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBE, "shots", 2)
    others = tuple(str(write_colors(tmp_path / name)) for name in ("a.npz", "b.npz"))
    probed = replace(job, probes=others)
    assert digest(probed) != digest(job) != digest(replace(job, probes=others[:1]))
    assert run_job(probed, tmp_path / "run")
    draws = json.loads((tmp_path / "run" / RESULT).read_text())["draws"]
    assert len(draws) == 2 * PROBE["draws"]
    assert read_result(tmp_path / "run").fewshot == pytest.approx(np.mean(draws))
    pool, test = module.open_probe(others[0])
    assert (len(pool), len(test)) == (30, 12)


def test_images_are_shrunk_once(tmp_path, monkeypatch):
    folder = tmp_path / "photos"
    for split, shade in (("train", 10), ("train", 200), ("test", 100)):
        (folder / split / "gray").mkdir(parents=True, exist_ok=True)
        Image.new("L", (60, 40), shade).save(folder / split / "gray" / f"{shade}.png")
    path = shrink(str(folder), tmp_path / "small")
    assert Path(path).name == "photos.npz"
    with np.load(path) as arrays:
        assert arrays["x_train"].shape == (2, 32, 32, 3)
        assert sorted(arrays["x_train"][:, 5, 5, 0]) == [10, 200]
        assert (arrays["y_test"].tolist(), arrays["class_names"].tolist()) == ([0], ["gray"])
    monkeypatch.setattr("reproduction.jobs.decode", None)
    assert shrink(str(folder), tmp_path / "small") == path


LONG = """
import signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from reproduction.runner import Runner
from test_jobs import long_job

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # however the tests were started
    jobs = {("long", seed): long_job(sys.argv[4], seed) for seed in range(2)}
    Runner(Path(sys.argv[3]), 2).results(jobs)
"""


def long_job(data, seed):
    return Job(data=data, settings=replace(SETTINGS, steps=40, save_minutes=0.002, seed=seed))


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def checkpoints(jobs):
    """Return the folders of jobs that have saved a checkpoint after a step."""
    folders = list(jobs.iterdir()) if jobs.exists() else []
    return [path for path in folders if has_state(path) and (path / "config.json").exists()]


def workers_of(session):
    """Return processes that are still alive in the session of one that has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(entry.name)
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_jobs_resume_and_workers_end(how, colors, tmp_path):
    here, out = Path(__file__).parent, tmp_path / "runner"
    (tmp_path / "long.py").write_text(LONG)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, (here, here.parent)), *sys.path])
    words = [str(here), str(here.parents[1]), str(out), colors]
    process = subprocess.Popen(
        [sys.executable, tmp_path / "long.py", *words], env=environment, start_new_session=True
    )
    wait_for(lambda: checkpoints(out / "jobs") or process.poll() is not None, 200)
    process.send_signal(how)  # to the parent only
    process.communicate(timeout=200)
    wait_for(lambda: not workers_of(process.pid), 60)
    first = checkpoints(out / "jobs")[0]
    if how == signal.SIGKILL:
        jobs = {digest(job): job for job in (long_job(colors, seed) for seed in range(2))}
        log = Recorder()
        assert run_job(jobs[first.name], first, callback=log)
        assert any(line.startswith("resumed at step") for line in log.lines)
        assert read_result(first) is not None
