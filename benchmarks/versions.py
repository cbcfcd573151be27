"""Speed of this version beside 0.1: steps, data, serving and export, interleaved.

0.1 is unpacked from the repository's history, so this section needs a clone with it.
"""

import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from timing import claim
from vitrail import __version__

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "3c98550"  # 0.1.0
HEADING = "## Previous version"
ROUNDS = 9
TEXT = """
Both versions run the same calls in two processes, round by round
(`python scripts/compare_versions.py`). Times are medians; the ratio is the median over rounds, and
below 1 this version is faster.
"""


def report(rounds: int = ROUNDS, tasks: str = "") -> str:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", COMMIT, "src"], capture_output=True, check=False
        )
        if archive.returncode:
            return f"{HEADING}\n\nNot measured: the history of git does not contain {COMMIT} (0.1)"
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        script = ROOT / "scripts" / "compare_versions.py"
        options = ["--rounds", str(rounds), "--tasks", tasks, "--names", "0.1", __version__]
        command = [sys.executable, script, folder, ROOT, *options]
        table = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    ratios = [float(row.split("|")[-2]) for row in table.splitlines()[2:]]
    if not ratios:
        return f"{HEADING}\n\nNot measured: no call works in both versions"
    middle, worst = statistics.median(ratios), max(ratios)
    text = (
        f"median {middle:.2f} of the time of 0.1, at most {worst:.2f} ({len(ratios)} measurements)"
    )
    return "\n".join([HEADING, TEXT, claim("Same calls as in 0.1", text), "", table])
