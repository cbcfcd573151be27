"""Measure a page of `vitrail export --to html` in Chromium, beside the ONNX file of the same model.

    python scripts/measure_page.py model.html model.onnx image.jpg

Prints CPU time, which other processes on the machine change little: of the page from opening to its
first answer, and of one image, from its bytes to probabilities, in interleaved rounds.
"""

import base64
import os
import sys
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

from vitrail import Predictor

ROUNDS, IMAGES = 8, 5
START = """(data) => {
  window.blob = new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))]);
  return vitrail.classify(blob);
}"""
MORE = "async (count) => { for (let i = 0; i < count; i++) await vitrail.classify(blob); }"


def renderer_seconds() -> float:
    """CPU time of all threads of the renderer processes below this one (Linux)."""
    parents, total = {}, 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")")[-1].split()[1]
            )
        except OSError:
            continue
    for pid in parents:
        parent = pid
        while parent := parents.get(parent, 0):
            if parent == os.getpid():
                break
        try:
            if parent and b"--type=renderer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    total += int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def main(page: str, onnx: str, image: str) -> None:
    data = Path(image).read_bytes()
    predictor = Predictor(onnx)
    predictor([data])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_context(offline=True).new_page()
        tab.set_default_timeout(0)
        start = renderer_seconds()
        tab.goto(Path(page).absolute().as_uri())
        tab.evaluate(START, base64.b64encode(data).decode())
        print(f"{Path(page).stat().st_size / 2**20:.1f} MiB", end=", ")
        print(f"first answer after {renderer_seconds() - start:.2f} s")
        tab.evaluate(MORE, 2 * IMAGES)
        times: dict[str, list[float]] = {"page": [], "onnxruntime": []}
        for _ in range(ROUNDS):
            start = renderer_seconds()
            tab.evaluate(MORE, IMAGES)
            times["page"].append(renderer_seconds() - start)
            start = time.process_time()
            for _ in range(IMAGES):
                predictor([data])
            times["onnxruntime"].append(time.process_time() - start)
        for name, seconds in times.items():
            print(f"{name}: {1000 * median(seconds) / IMAGES:.1f} ms per image")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
