import json
import re
import tomllib
from pathlib import Path

import pytest

from vitrail.cli import doctor, main
from vitrail.extras import EXTRAS
from vitrail.formatting import GIB
from vitrail.planning import doctor as planning
from vitrail.planning.doctor import cpu_quota, draw_conclusions, find_problems, memory_limit

ROOT = Path(__file__).parents[2]


def package(name, least, version, below=""):
    return {"name": name, "least": least, "below": below, "version": version}


PROCESSOR = {"model": "A Processor", "cores": 8, "allowed": 4, "quota": None, "load": 0.3}
PROCESSOR |= {"threads": 4, "capability": "AVX2", "able": {"AVX2": True, "AVX-512": False}}
HEALTHY = planning.Machine(
    vitrail="1.0",
    python="3.12.1",
    system="Linux 6.1, x86_64",
    packages=[package("torch", "2.13", "2.13.0+cpu")],
    extras={"fast": [package("simplejpeg", "1.9", None)]},
    broken="",
    whole=True,
    processor=PROCESSOR,
    memory={"total": 16 * GIB, "limit": 8 * GIB, "free": 6 * GIB},
    accelerators=[],
    disks=[{"what": "runs", "path": "/data/runs", "free": 30 * GIB, "writable": True}],
    environment={"OMP_NUM_THREADS": "4"},
)
RATES = {"float32": 200e9, "float32_alone": 60e9, "bfloat16": 50e9}
RATES |= {"jpeg_simplejpeg": 500.0, "jpeg_pillow": 250.0}
WHY = "this processor has no instructions for bfloat16"
SPEEDS = planning.Speeds(threads=4, precision="float32", reason=WHY, parts=4, **RATES)


def with_processor(**changes):
    return HEALTHY | {"processor": PROCESSOR | changes}


def with_disk(**changes):
    return HEALTHY | {"disks": [HEALTHY["disks"][0] | changes]}


def test_report_of_a_healthy_machine():
    assert find_problems(HEALTHY) == []  # a missing extra is no problem
    lines = list(doctor.report(HEALTHY, SPEEDS, []))
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "No problems found"
    for words in ("'vitrail[fast]'", "torch uses AVX2", "6.00 GiB free", "200.0 GFLOP/s"):
        assert words in "\n".join(lines)


@pytest.mark.parametrize("extra", EXTRAS)
def test_missing_extra_has_its_pip_command(extra):
    machine = HEALTHY | {"extras": {extra: [package("missing", "1.0", None)]}}
    lines = [line.strip() for line in doctor.report(machine, SPEEDS, [])]
    assert f"pip install 'vitrail[{extra}]'" in lines


@pytest.mark.parametrize(
    ("machine", "what", "remedy"),
    [
        (with_processor(threads=16), "16 threads", "OMP_NUM_THREADS=4"),
        (with_processor(quota=1.5), "may use only 2 cores", "OMP_NUM_THREADS=2"),
        (with_processor(threads=1), "one thread", "unset OMP_NUM_THREADS"),
        (with_processor(load=11.5), "load average 11.5", "wait for other processes"),
        (with_disk(free=GIB // 2), "512 MiB free for /data/runs", "pass --out"),
        (HEALTHY | {"memory": {"total": GIB, "limit": None, "free": GIB // 4}}, "256 MiB", "close"),
        (HEALTHY | {"extras": {"export": [package("onnx", "1.19", "1.2")]}},
         "onnx is 1.2, and vitrail[export] needs 1.19", "--upgrade 'vitrail[export]'"),
        (HEALTHY | {"extras": {"serve": [package("uvicorn", "0.35", "0.60.1", "0.55")]}},
         "uvicorn is 0.60.1, and vitrail[serve] needs 0.35,<0.55", "--upgrade"),
    ],
)  # fmt: skip
def test_slow_configurations_have_a_remedy(machine, what, remedy):
    (problem,) = find_problems(machine)
    assert what in problem["what"]
    assert remedy in problem["remedy"]
    assert not problem["fatal"]


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (with_disk(writable=False), "not writable: /data/runs"),
        (with_disk(free=2**20), "1 MiB free"),
        (HEALTHY | {"packages": [package("numpy", "2.0", None)]}, "numpy is missing"),
        (HEALTHY | {"packages": [package("numpy", "2.0", "1.26")]}, "numpy is 1.26"),
        (HEALTHY | {"packages": [package("tyro", "1.0", "2.1", "2")]}, "install 'tyro>=1.0,<2'"),
        (HEALTHY | {"broken": "OSError: libgomp"}, "torch cannot be imported: OSError: libgomp"),
    ],
)
def test_fatal_problems_are_status_1(machine, what, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_machine", lambda: machine)
    assert main(["doctor", "--no-measure"]) == 1
    assert what in capsys.readouterr().out.partition("Problems")[2]


def test_container_limits(tmp_path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, quota in (("-1", None), ("50000", 0.5)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{text}\n")
        assert cpu_quota(tmp_path) == quota
    for text, quota in (("max 100000", None), ("250000 100000", 2.5)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert cpu_quota(tmp_path) == quota
    assert memory_limit(["memory.max"], GIB, tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{GIB // 2}\n")
    assert memory_limit(["memory.max"], GIB, tmp_path) == GIB // 2
    assert memory_limit(["memory.max"], GIB // 4, tmp_path) is None


def test_conclusions():
    words = "\n".join(draw_conclusions(HEALTHY, SPEEDS))
    assert "4.0 times as fast as bfloat16" in words
    assert f"training uses float32: {WHY}" in words
    assert "4 threads are 3.3 times as fast as one" in words
    assert "4 shards" in words
    assert "simplejpeg, 2.0 times as fast as Pillow" in words
    other = SPEEDS | {"bfloat16": 400e9, "threads": 1, "parts": 1, "jpeg_simplejpeg": None}
    words = "\n".join(draw_conclusions(HEALTHY | {"accelerators": ["cuda:0 X, 80 GiB"]}, other))
    for expected in ("2.0 times as fast as float32", "vitrail[fast]", "cuda:0 X, 80 GiB"):
        assert expected in words
    assert "threads are" not in words


def test_json_report_of_this_machine(capsys):
    status = main(["doctor", "--json", "--no-measure"])
    report = json.loads(capsys.readouterr().out)
    assert status == any(problem["fatal"] for problem in report["problems"])
    assert report["measured"] is None
    assert {"torch", "numpy", "pillow"} <= {package["name"] for package in report["packages"]}
    assert report["processor"]["threads"] >= 1
    assert report["memory"]["total"] > report["memory"]["free"] > 0
    assert report["disks"][0]["what"] == "runs"


def test_every_speed_is_measured():
    speeds = planning.measure_speeds(seconds=0.0, width=8, side=16)
    assert min(speeds[name] for name in RATES if name != "jpeg_simplejpeg") > 0
    assert speeds["parts"] >= 1
    assert speeds["precision"] in ("float32", "bfloat16", "float16")


def test_requirements_may_have_bounds_extras_and_markers(monkeypatch):
    lines = [
        "tyro<2,>=1.0",
        "torchvision",
        "uvicorn[standard]<0.55,>=0.35; extra == 'serve'",
        "uvloop>=0.21; (sys_platform != 'win32') and extra == \"serve\"",
    ]
    monkeypatch.setattr(planning.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(planning.metadata, "version", lambda name: "1.2.3")
    assert planning.requirements() == {
        "": [package("tyro", "1.0", "1.2.3", "2"), package("torchvision", "", "1.2.3")],
        "serve": [
            package("uvicorn", "0.35", "1.2.3", "0.55"), package("uvloop", "0.21", "1.2.3")
        ],
    }  # fmt: skip


def test_extras_match_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert EXTRAS.keys() <= project["optional-dependencies"].keys()
    assert {p["name"] for p in planning.requirements()["fast"]} == {"simplejpeg"}
    named = {re.split(r"[<>=\[;]", line)[0].replace("_", "-") for line in project["dependencies"]}
    assert {p["name"].replace("_", "-") for p in planning.requirements()[""]} == named
