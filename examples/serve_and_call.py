"""Serve a model, ask it over HTTP with nothing but Python's own library, and stop it.

    python examples/serve_and_call.py                        trains a model for half a minute
    python examples/serve_and_call.py runs/first cat.jpg     a model and pictures of yours

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


def ask(address, picture=None):
    """What the server says; a picture, as the bytes of its file, is sent along."""
    request = Request(address, picture, {"Content-Type": "application/octet-stream"})
    while True:
        try:
            with urlopen(request, timeout=60) as response:
                return response.read()
        except HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers.get("Retry-After", 1)))  # it warms up, or is busy


def main(model="", pictures=(), out=None, minutes=0.5):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    sent = {Path(name).name: Path(name).read_bytes() for name in pictures}
    if not model:
        print(f"training a model, {60 * minutes:.0f} seconds")
        model = vitrail.train("builtin:sign-digits", out / "model", minutes=minutes).folder
        source = vitrail.open_dataset("builtin:sign-digits", "test")
        sent = {source.name(index): source[index].data for index in range(50, 400, 80)}
    command = [sys.executable, "-m", "vitrail", "serve", str(model), "--port", "0", "--log", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.strip() for line in server.stdout if line.startswith("http://")), "")
            if not url:
                sys.exit("the server did not start")
            ask(f"{url}/ready")
            print(f"{url} serves {json.loads(ask(f'{url}/model'))['architecture']}")
            for number, (name, picture) in enumerate(sent.items()):
                best = json.loads(ask(f"{url}/predict", picture))["answers"][0]["guesses"][0]
                print(f"  {name}: {best['label']!r}, {best['probability']:.1%} sure")
                (out / f"{number}.png").write_bytes(ask(f"{url}/explain", picture))
        finally:
            server.terminate()  # it answers those whom it has let in, and ends
    print(f"the server ended with status {server.returncode}; where it looked: {out}/*.png")


if __name__ == "__main__":
    main(*sys.argv[1:2], pictures=sys.argv[2:])
