import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COUNT = 2000
# A thread for each of 64 cores maps gigabytes, and what may be mapped is limited.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def test_mutated_files_load_or_raise_one_line(tmp_path):
    script = Path(__file__).parent / "mutations.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(COUNT)],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["wrong"] == [], "\n".join(outcome["wrong"][:3])
    assert outcome["loads"] + outcome["errors"] == COUNT
    assert outcome["errors"] > COUNT / 2  # the mutations bite
    assert outcome["peak_mib"] < 2048
