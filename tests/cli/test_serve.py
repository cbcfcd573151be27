import socket

import pytest

import vitrail
from vitrail.cli import main
from vitrail.cli.predict import Serve
from vitrail.prediction import predictor as predictors
from vitrail.serving import server
from vitrail.serving.config import ServerConfig, parse_models


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=3), folder)
    return folder


def test_port_in_use_is_one_line_and_status_2(bundle, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(bundle), "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1, port {port}: address already in use" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "every machine that reaches 0.0.0.0 could teach classes"),
        (("{}", "tiny={}"), "two models are called 'tiny'"),
        (("=x{}",), "is not a model"),
        (("{}/gone",), "file not found"),
        (("{}", "--port", "99999"), "port=99999 is out of range"),
        (("{}", "--host", "no.such.host.invalid"), "cannot resolve address"),
        (("{}", "--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
        (("{}", "--queue", "3"), "never fits into a queue of 3"),
        (("{}", "--max-megabytes", "1000"), "requests share"),
        (("{}", "--max-pixels", "1000000000"), "exceeds the decoder's limit"),
        (("{}", "--timeout", "0"), "timeout=0.0 must be greater than 0"),
        (("{}", "--teach-to", "x"), "it needs --allow-teach"),
        (("{}", "--token", "päss"), "printable ASCII"),
        (("{}", "--merge", "1", "--allow-teach"), "omit --merge, or serve a model without"),
        (("{}", "--port", "0", "--allow-teach"), "pass --using"),
        (("{}", "--port", "0", "--examples", "nowhere"), "Dataset not found: nowhere"),
    ],
)
def test_bad_options_are_one_line(bundle, capsys, words, said):
    assert main(["serve", *(word.format(bundle) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_model_that_cannot_be_loaded_is_named(bundle, monkeypatch, capsys):
    def fail(reference, **_):
        if reference == "broken":
            raise vitrail.CheckpointError("shape mismatch")
        return predictor(reference)

    predictor = predictors.Predictor
    monkeypatch.setattr(predictors, "Predictor", fail)
    assert main(["serve", str(bundle), "other=broken", "--port", "0"]) == 2
    assert capsys.readouterr().err.endswith("vitrail: other: shape mismatch\n")


def test_model_names_come_from_folders_or_arguments(tmp_path):
    (tmp_path / "odd=name").mkdir()
    words = (f"{tmp_path}/odd=name", "digits=runs/first/", "hf:google/vit-base", "x/model.onnx")
    assert list(parse_models(words)) == ["odd=name", "digits", "vit-base", "model"]


def test_options_reach_the_server_and_its_predictor(monkeypatch):
    seen = {}

    def serve(models, settings, *, predictor, **_):
        seen["settings"] = settings
        predictor("a")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(predictors, "Predictor", lambda reference, **how: seen.update(how))
    monkeypatch.setenv("VITRAIL_TOKEN", "from-the-environment")
    Serve(models=("a",), max_megabytes=0.5, queue=80, allow_origin=("https://x.example",)).run()
    settings = seen["settings"]
    assert (settings.token, settings.max_body) == ("from-the-environment", 2**19)
    assert (settings.queue, settings.allow_origin) == (80, ("https://x.example",))
    Serve(models=("a",), token="other", engine="onnx-int8", data="photos", max_drop=0.5).run()
    assert (seen["settings"].token, seen["engine"]) == ("other", "onnx-int8")
    assert (seen["guard"].data, seen["guard"].max_drop) == ("photos", 0.5)
    monkeypatch.setenv("VITRAIL_TOKEN", "")
    for token in (None, ""):
        with pytest.raises(vitrail.ConfigError, match="the token is empty"):
            Serve(models=("a",), token=token).run()


def test_loopback_addresses():
    for host in ("", "0.0.0.0", "::", "192.168.1.5", "fe80::1", "desk.example"):
        assert not ServerConfig(host=host).is_loopback
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "::1"):
        assert ServerConfig(host=host).is_loopback
