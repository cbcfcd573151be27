import asyncio
import hashlib
import itertools
import json
import signal
from collections import Counter

import pytest
from raw_client import closed_loop, raw, run
from server_process import serving
from serving_helpers import encoded_image, tiny_model

import vitrail

pytestmark = pytest.mark.slow

PREDICT = raw("/predict", encoded_image(), "image/png")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    vitrail.save(tiny_model(), folder)
    return folder


def test_sigterm_under_load_loses_no_admitted_request(bundle):
    one_thread = {"OMP_NUM_THREADS": "1"}
    with serving(str(bundle), "--log", "json", environment=one_thread) as server:

        async def scenario():
            loaded = asyncio.Event()

            def requests():
                for number in itertools.count():
                    if number == 60:  # so all but 12 of them are answered
                        loaded.set()
                    yield PREDICT

            load = asyncio.create_task(closed_loop(server.port, requests(), clients=12, leave=True))
            await loaded.wait()
            server.terminate()
            return await load

        results = run(scenario())
        assert server.process.wait(timeout=60) == 0
        counts = results.counts()
        assert counts.keys() == {200, 503}  # no reset
        assert counts[200] > 30
        assert counts[503] <= 12
        lines = [json.loads(x) for x in server.output.read_text().splitlines() if x[0] == "{"]
        (drain,) = (line for line in lines if "event" in line)
        assert drain["level"] == "info"
        assert drain["event"].startswith("shutting down; ")
        requests = [line for line in lines if line is not drain]
        routes = Counter((line["route"], line["status"]) for line in requests)
        assert routes["/predict", 200] == counts[200]
        assert routes["/predict", 503] == counts[503]
        assert "Traceback" not in server.output.read_text()


def test_idle_server_stops_at_once_and_public_server_warns(bundle):
    with serving(str(bundle), "--host", "0.0.0.0", "--log", "off") as server:
        assert "vitrail: other machines can use this server" in server.output.read_text()
        digest = hashlib.sha256((bundle / "config.json").read_bytes()).hexdigest()
        assert json.loads(server.get("/model")[1])["digest"] == digest
        info = f'digest="{digest}",model="tiny",version="{vitrail.__version__}"'
        assert f"vitrail_model_info{{{info}}} 1.0" in server.get("/metrics")[1].decode()
        assert "accepted Host headers: IP addresses, " in server.output.read_text()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0


def test_sighup_drains(bundle):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children of nohup inherit SIG_IGN
    try:
        with serving(str(bundle)) as server:
            server.process.send_signal(signal.SIGHUP)
            assert server.process.wait(timeout=60) == 0
            assert "shutting down; " in server.output.read_text()
    finally:
        signal.signal(signal.SIGHUP, before)
