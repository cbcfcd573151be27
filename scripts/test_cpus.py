"""Run the numeric tests with other instruction sets, other thread counts and a busy core.

    python scripts/test_cpus.py                 every run
    python scripts/test_cpus.py default busy    runs whose name contains a word

One line for each run; the output of those that fail comes after it, and the exit status is 1.
Variables of torch, oneDNN, MKL and OpenBLAS choose the instructions, up to those of this CPU;
onnxruntime always uses the best there are.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "models": "axial cache gelu init lora patch_dropout pos_embed token_merging vit",
    "checkpoints": "adapt google",
    "data": "augment transforms",
    "training": "cpu_parallel masked_patches muon objectives optim",
    "evaluation": "calibration evaluate results",
    "probing": "fewshot probes ridge teach",
    "inspection": "attention faithfulness relevance representations",
    "export": "onnx session",
    "prediction": "engines predictor",
    "reference": "torchvision transformers",
}
FILES = [f"tests/{place}/test_{x}.py" for place, names in TESTS.items() for x in names.split()]


def instructions(torch: str, onednn: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_CBWR": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


SSE = instructions("default", "SSE41", "COMPATIBLE", "Prescott")
AVX2 = instructions("avx2", "AVX2", "AVX2", "Haswell")
RUNS = {  # name → instructions, torch's threads
    "default, 1 thread": (SSE, 1),
    "avx2, 2 threads": (AVX2, 2),
    "native, 1 thread": ({}, 1),
    "native, 2 threads": ({}, 2),
    "native, 4 threads": ({}, 4),
    "native, 1 thread, busy core": ({}, 1),
}


def main(*words: str) -> None:
    failed = False
    for name, (chosen, threads) in RUNS.items():
        if words and not any(word in name for word in words):
            continue
        environment = os.environ | chosen | {"VITRAIL_TEST_THREADS": str(threads)}
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # or more threads than cores wait for each other
        start = time.monotonic()
        with busy_core(name.endswith("busy core")):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--tb=short", *FILES],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
        result = (done.stdout.splitlines() or [done.stderr])[-1].partition(" in ")[0]
        print(f"{name:28} {time.monotonic() - start:6.0f} s  {result}", flush=True)
        if done.returncode:
            failed = True
            print(done.stdout + done.stderr, flush=True)
    sys.exit(failed)


@contextmanager
def busy_core(enabled: bool):
    """Keep one core busy meanwhile."""
    if not enabled:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
