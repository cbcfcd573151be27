from pathlib import Path

import pytest

from fuzzing import run

pytestmark = pytest.mark.slow


def test_mutated_files_load_or_raise_one_line(tmp_path):
    outcome = run(Path(__file__).parent / "mutations.py", 2000, tmp_path)
    assert outcome["peak_mib"] < 2048
