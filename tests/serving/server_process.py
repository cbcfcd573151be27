"""A real server in a subprocess."""

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_START_SECONDS = 120.0  # seconds


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    output: Path  # standard output and error

    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None):
    """Run `vitrail serve` with these arguments; yield once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "vitrail", "serve", *arguments, "--port", "0"],
                stdout=file,
                stderr=file,
                env=os.environ | (environment or {}),
            )
        try:
            yield Server(process, wait(process, output), output)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait(process: subprocess.Popen, output: Path) -> int:
    """Wait until the server is ready; return its port."""
    until = time.monotonic() + MAX_START_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, output.read_text()
        if found := re.search(r"^http://.*:(\d+)$", output.read_text(), re.MULTILINE):
            server = Server(process, int(found[1]), output)
            if server.get("/ready")[0] == 200:
                return server.port
        time.sleep(0.05)
    raise AssertionError(f"not ready in time: {output.read_text()}")
