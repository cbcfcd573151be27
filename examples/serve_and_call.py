"""Serve a model, call it over HTTP with the standard library only, and stop it.

    python examples/serve_and_call.py                        trains a model for half a minute
    python examples/serve_and_call.py runs/first cat.jpg     your own model and images

Serving needs: pip install 'vitrail[serve]'.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import vitrail


def call(url, image=None):
    """Return the response body; `image` is an encoded file to send."""
    request = Request(url, image, {"Content-Type": "application/octet-stream"})
    while True:
        try:
            with urlopen(request, timeout=60) as response:
                return response.read()
        except HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers.get("Retry-After", 1)))  # warming up or busy


def main(model="", images=(), out=None, minutes=0.5):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    images = {Path(name).name: Path(name).read_bytes() for name in images}
    if not model:
        print(f"training a model, {60 * minutes:.0f} seconds")
        model = vitrail.train("builtin:sign-digits", out / "model", minutes=minutes).folder
        dataset = vitrail.open_dataset("builtin:sign-digits", "test")
        images = {dataset.name(index): dataset[index].data for index in range(50, 400, 80)}
    command = [sys.executable, "-m", "vitrail", "serve", str(model), "--port", "0", "--log", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.strip() for line in server.stdout if line.startswith("http://")), "")
            if not url:
                sys.exit("the server did not start")
            call(f"{url}/ready")
            print(f"{url} serves {json.loads(call(f'{url}/model'))['architecture']}")
            for number, (name, image) in enumerate(images.items()):
                best = json.loads(call(f"{url}/predict", image))["answers"][0]["guesses"][0]
                print(f"  {name}: {best['label']!r}, confidence {best['probability']:.1%}")
                (out / f"{number}.png").write_bytes(call(f"{url}/explain", image))
        finally:
            server.terminate()  # it finishes accepted requests, then exits
    print(f"the server exited with status {server.returncode}; relevance maps: {out}/*.png")


if __name__ == "__main__":
    main(*sys.argv[1:2], images=sys.argv[2:])
