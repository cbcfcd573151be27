import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from serving_helpers import CLASSES, encoded_image, make_client, make_state, post, tiny_model
from starlette.testclient import TestClient

import vitrail
from tiny_runs import write_colors
from vitrail.errors import ConfigError
from vitrail.probing import teach as probing_teach
from vitrail.probing.teach import ProbeMemory, save_memory
from vitrail.serving import registry
from vitrail.serving.app import make_app
from vitrail.serving.limits import ApiError, Upload

pytestmark = pytest.mark.slow


def files(color, count=6, seed=0):
    return [("pictures", (f"{n}", encoded_image(color, seed=seed + n))) for n in range(count)]


@pytest.fixture
def taught():
    """A server whose model remembers images of red and green."""
    model = tiny_model()
    with make_state({"tiny": model}, allow_teach=True) as state:
        served = state.registry.get(None)
        predictor = served.predictor
        data = [encoded_image(color, seed=50 + n) for color in ("red", "green") for n in range(5)]
        images = torch.stack([predictor.preprocess(each) for each in data])
        values = predictor.forward_features(images).numpy()
        memory = ProbeMemory.of(model, values, np.repeat([0, 1], 5), ("red", "green"))
        state.add_model("tiny", predictor, memory)
        with TestClient(make_app(state)) as client:
            yield state, client


def teach(client, name, color):
    return client.post(f"/teach?name={name}", files=files(color))


def predicted(client, color):
    return post(client, data=encoded_image(color, seed=90)).json()["answers"][0]["label"]


def test_taught_class_is_predicted_at_once(taught):
    state, client = taught
    before = state.registry.get(None)
    assert client.get("/model").json()["teach"] is True
    response = teach(client, "blue", "blue").json()
    assert response["classes"] == ["red", "green", "blue"]
    assert (response["pictures"], response["replaced"], response["engine"]) == (6, False, "torch")
    assert min(response["accuracy"], response["balanced_accuracy"]) > 0.6
    assert client.get("/model").json()["classes"] == ["red", "green", "blue"]
    assert [predicted(client, color) for color in CLASSES] == list(CLASSES)
    assert before.predictor.classes == CLASSES  # requests keep the version they started with
    assert state.registry.get(None) is not before
    assert client.get("/metrics").text.count("vitrail_model_info{") == 1


def test_teaching_again_replaces_the_class_and_reports_unreadable_images(taught):
    state, client = taught
    teach(client, "blue", "red")
    state.pool.max_pixels = 100  # the limit applies to teaching too
    large = encoded_image(size=(20, 20))
    pictures = [*files("blue"), ("pictures", ("broken", b"text")), ("pictures", ("large", large))]
    response = client.post("/teach?name=blue", files=pictures).json()
    assert (response["replaced"], response["pictures"]) == (True, 6)
    assert [error["name"] for error in response["errors"]] == ["broken", "large"]
    assert "above the limit of 100 pixels" in response["errors"][1]["error"]
    assert predicted(client, "blue") == "blue"


def test_invalid_teach_request_changes_nothing(taught):
    state, client = taught
    before = state.registry.get(None)
    for query in ("", "?name=", "?name=%20%20", "?name=a%00b", f"?name={'x' * 101}"):
        assert client.post(f"/teach{query}", files=files("blue")).status_code == 422
    for field, data, status in (("pictures", b"text", 422), ("other", encoded_image(), 400)):
        form = [(field, ("x", data))]
        assert client.post("/teach?name=blue", files=form).status_code == status
    assert state.registry.get(None) is before


def test_taught_model_is_saved_as_a_bundle(taught, tmp_path):
    state, client = taught
    state.teach_folders["tiny"] = tmp_path / "kept"
    teach(client, "blue", "blue")
    kept = vitrail.Predictor(tmp_path / "kept", device="cpu")
    assert kept(encoded_image("blue", seed=90)).label == "blue"
    assert (tmp_path / "kept" / "probe.safetensors").exists()  # it can be taught further
    (tmp_path / "file").write_text("")
    state.teach_folders["tiny"] = tmp_path / "file" / "below"
    before = state.registry.get(None)
    rejected = teach(client, "gray", "red")
    assert rejected.status_code == 503
    assert str(tmp_path) not in rejected.text
    assert state.registry.get(None) is before


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kept", [True, False])
def test_failed_save_leaves_the_folder_unchanged(taught, tmp_path, monkeypatch, kept):
    state, client = taught
    folder = state.teach_folders["tiny"] = tmp_path / "kept"
    folder.mkdir()
    if kept:
        assert teach(client, "blue", "blue").status_code == 200
        (folder / "notes.txt").write_text("unrelated")
    before, served = contents(folder), state.registry.get(None)

    with monkeypatch.context() as patch:  # fails after the memory was saved
        patch.setattr(registry, "save", Mock(side_effect=OSError("no space left on device")))
        assert teach(client, "gray", "red").status_code == 503
    assert contents(folder) == before
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").mkdir()  # a directory blocks the move
    before = contents(folder)
    rejected = teach(client, "gray", "red")
    assert rejected.status_code == 503
    assert "was not added" in rejected.json()["error"]
    assert contents(folder) == before
    assert {path.name for path in folder.iterdir()} == {*before, "config.json"}
    assert state.registry.get(None) is served
    (folder / "config.json").rmdir()
    assert teach(client, "gray", "red").status_code == 200
    assert "gray" in vitrail.Predictor(folder, device="cpu").classes


def test_taught_model_that_fails_to_load_is_not_saved(taught, tmp_path, monkeypatch):
    state, client = taught
    folder = state.teach_folders["tiny"] = tmp_path / "kept"

    monkeypatch.setattr(registry, "Predictor", lambda *_, **__: 1 / 0)
    assert teach(client, "blue", "blue").status_code == 500
    assert not folder.exists()


def test_abandoned_thread_does_not_undo_a_later_class(taught):
    """It started before the other one and returns after it."""
    state, client = taught
    stuck, started, release = state.registry.get(None), threading.Event(), threading.Event()
    rejected = []

    def late(model, memory, taught):
        started.set()
        assert release.wait(20)
        return probing_teach.fit_head(model, memory, taught=taught)

    def teach_slowly():
        images = [state.pool.submit(encoded_image("red"), stuck.predictor.preprocess)]
        uploads = [Upload("x", encoded_image("red"))]
        try:
            registry.teach(state.registry, "tiny", "gray", uploads, images, None)
        except ApiError as refusal:
            rejected.append(refusal.status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "fit_head", late)
        thread = threading.Thread(target=teach_slowly)
        thread.start()
        assert started.wait(20)
    assert teach(client, "blue", "blue").status_code == 200
    release.set()
    thread.join(20)
    assert rejected == [503]
    assert client.get("/model").json()["classes"] == ["red", "green", "blue"]


def test_first_class_waits_for_a_second():
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    with make_state({"bare": model}, allow_teach=True) as state:
        served = state.registry.get(None)
        memory, notes = registry.load_memory(served.predictor, "bare", None)
        assert notes == []
        state.add_model("bare", served.predictor, memory)
        client = make_client(state)
        first = teach(client, "red", "red").json()
        assert "teach another one" in first["notes"][0]
        second = teach(client, "blue", "blue").json()
        assert second["classes"] == ["red", "blue"]
        provenance = state.registry.get(None).predictor.metadata.provenance
        assert provenance["taught"] == ["red", "blue"]
        assert predicted(client, "blue") == "blue"


def test_memory_is_built_from_the_training_data(tmp_path):
    data = write_colors(tmp_path / "colors.npz", train=30, test=6)
    vitrail.save(tiny_model(), tmp_path / "run", provenance={"data": str(data)})
    predictor = vitrail.Predictor(tmp_path / "run", device="cpu")
    memory, notes = registry.load_memory(predictor, str(tmp_path / "run"), None)
    assert memory.classes == CLASSES
    assert "30 images of the 3 known classes" in notes[0]
    data.unlink()
    with pytest.raises(ConfigError, match="--using"):
        registry.load_memory(predictor, str(tmp_path / "run"), None)


def test_taught_model_never_overwrites_another(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    vitrail.save(tiny_model(), one)
    vitrail.save(tiny_model(), other)

    def folder(root, several=False):
        return registry.folder_for(root, "one", f"{one}/", several=several)

    with pytest.raises(ConfigError, match="other already holds a model"):
        folder(other)
    with pytest.raises(ConfigError, match=r"one has no probe\.safetensors.*pass another folder"):
        folder(one)
    values = np.zeros((2, tiny_model().config.num_features), np.float32)
    save_memory(ProbeMemory.of(tiny_model(), values, np.arange(2), ("red", "green")), one)
    assert folder(one) == one
    assert folder(tmp_path / "new", several=True) == tmp_path / "new" / "one"
    assert folder(None) is None
