"""No input may cost more CPU time or memory than its size allows.

Runs `scripts/fuzz_cost.py` for a few seconds; CONTRIBUTING.md tells how to run it for longer.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # they are on no package's path

import fuzz_cost
import fuzz_inputs
from fuzz_cost import Bound, Cost, Worker, examine, excess, largest
from fuzz_inputs import Family

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc"),
    pytest.mark.slow,
]
KNOWN = (  # attacks that once worked
    *("JPEG frame headers", "BMP empty rows", "TIFF tile", "AVIF that says 16 x 16", "npz bomb"),
    *("http pipelined", "http-drip trailer value", "http trailers", "csv short rows"),
    *("pax records", "large class number", "idx bomb"),
)
QUICK = ("image", "tar", "csv", "jsonl", "npz", "npy", "form", "http")
RANDOM = 120  # inputs in all
MAX_BYTES = 2**17


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("cost"))
    yield worker
    worker.stop()


@pytest.mark.parametrize("name", KNOWN)
def test_known_attacks_stay_within_bounds(name, worker):
    family = fuzz_inputs.named()[name]
    finding = examine(family, worker, largest(family, fuzz_cost.MAX_BYTES))
    assert finding is None, f"{finding.kind}: {finding.text}"


@pytest.mark.parametrize("target", QUICK)
def test_first_seed_is_accepted_and_random_growth_stays_within_bounds(target, worker):
    assert worker.run(target, fuzz_inputs.seeds(target)[0]).outcome == "accepted"
    for number in range(RANDOM // len(QUICK)):
        family = fuzz_inputs.random_family(target, random.Random(number))
        finding = examine(family, worker, largest(family, MAX_BYTES))
        assert finding is None, f"{number}: {finding.family}: {finding.kind}: {finding.text}"


def test_excess_names_the_broken_bound():
    def cost(**values):
        defaults = {"cpu": 0.1, "memory": 0, "reference": 0.01, "outcome": "refused", "size": 1000}
        return Cost(**defaults | values)

    assert excess("tar", cost()) is None
    assert excess("tar", cost(cpu=10.0))[0] == "cpu"
    assert excess("tar", cost(cpu=10.0, reference=1.0)) is None  # a slow machine
    assert excess("tar", cost(cpu=10.0, size=2**24, reference=0.1)) is None
    assert excess("tar", cost(memory=2**30))[0] == "memory"
    assert excess("tar", cost(outcome="crash: KeyError: 1"))[0] == "crash"
    assert excess("image", cost(memory=2**26, pixels=256))[0] == "memory"
    assert excess("image", cost(memory=2**26, pixels=2**22)) is None


@pytest.mark.parametrize(("power", "kind"), [(1.0, None), (1.2, None), (2.0, "growth")])
def test_superlinear_growth_is_found_below_the_bound(power, kind):
    def run(target, data):
        return Cost(0.01 * (len(data) / 1000) ** power, 0, 0.01, "accepted", len(data))

    family = Family("tar", "grows", lambda n: b"a" * n)
    finding = examine(family, SimpleNamespace(run=run), 4000)
    assert (finding and finding.kind) == kind


def test_largest_input_fits():
    for unit, most in ((1, 2**20), (7, 2**20), (512, 2**20), (0, 64)):
        family = Family("tar", "grows", lambda n, unit=unit: b"ab" + b"a" * unit * n, most)
        size = len(family.make(largest(family, 2**16)))
        assert size <= 2**16
        assert size > 2**16 - 2 * unit or not unit
    assert fuzz_inputs.SEEDS.keys() == fuzz_cost.TARGETS.keys()
    assert Bound().cpu_for(2**21) > Bound().cpu_for(2**20)
