import threading

import numpy as np
import pytest
import torch
from houses import CLASSES, a_house, picture, tiny_model
from starlette.testclient import TestClient

import vitrail
from tiny_runs import tiny_run, write_colors
from vitrail.errors import ConfigError
from vitrail.probing import teaching
from vitrail.probing.memory import remember, save_memory
from vitrail.serving import lessons
from vitrail.serving.app import make_app
from vitrail.serving.bodies import Upload
from vitrail.serving.refusals import Refusal
from vitrail.serving.settings import Limits
from vitrail.serving.shelf import Served


def files(color, count=6, seed=0):
    return [("pictures", (f"{n}", picture(color, seed=seed + n))) for n in range(count)]


@pytest.fixture
def taught():
    """A house whose model remembers pictures of red and green, and may be taught."""
    model = tiny_model()
    with a_house({"tiny": model}, teach=True) as house:
        served = house.shelf.get(None)
        predictor = served.predictor
        images = [
            predictor.prepare(picture(color, seed=50 + n))
            for color in ("red", "green")
            for n in range(5)
        ]
        values = predictor.vectors(torch.stack(images)).numpy()
        memory = remember(model, values, np.repeat([0, 1], 5), ("red", "green"))
        house.add(Served("tiny", predictor, house.tools, memory=memory))
        with TestClient(make_app(house)) as client:
            yield house, client


def test_a_class_is_learned_from_a_few_pictures_and_known_at_once(taught):
    house, client = taught
    before = house.shelf.get(None)
    assert client.get("/model").json()["teach"] is True
    found = client.post("/teach?name=blue", files=files("blue")).json()
    assert found["classes"] == ["red", "green", "blue"]
    assert (found["pictures"], found["replaced"], found["engine"]) == (6, False, "torch")
    assert found["accuracy"] > 0.6
    assert client.get("/model").json()["classes"] == ["red", "green", "blue"]
    for color in CLASSES:
        answer = client.post("/predict", content=picture(color, seed=90)).json()["answers"][0]
        assert answer["label"] == color
    assert before.predictor.classes == CLASSES  # who began with the old one keeps it
    assert house.shelf.get(None) is not before


def test_a_class_learned_again_is_replaced_and_what_cannot_be_read_is_told(taught):
    _, client = taught
    client.post("/teach?name=blue", files=files("red"))
    pictures = [*files("blue"), ("pictures", ("broken", b"text"))]
    found = client.post("/teach?name=blue", files=pictures).json()
    assert found["replaced"] is True
    assert found["pictures"] == 6
    assert found["errors"][0]["name"] == "broken"
    answer = client.post("/predict", content=picture("blue", seed=90)).json()["answers"][0]
    assert answer["label"] == "blue"


@pytest.mark.parametrize(
    ("query", "pictures", "status"),
    [
        ("", files("blue"), 422),
        ("?name=", files("blue"), 422),
        ("?name=%20%20", files("blue"), 422),
        ("?name=a%00b", files("blue"), 422),
        (f"?name={'x' * 101}", files("blue"), 422),
        ("?name=blue", [("pictures", ("x", b"text"))], 422),
        ("?name=blue", [("other", ("x", picture()))], 400),
    ],
)
def test_a_lesson_that_cannot_be_given_changes_nothing(taught, query, pictures, status):
    house, client = taught
    before = house.shelf.get(None)
    assert client.post(f"/teach{query}", files=pictures).status_code == status
    assert house.shelf.get(None) is before


def test_pictures_of_lessons_have_no_more_pixels_than_others(taught):
    house, _ = taught
    memory = house.shelf.get(None).memory
    with a_house(teach=True, limits=Limits(pixels=100)) as strict:
        strict.add(Served("tiny", strict.shelf.get(None).predictor, strict.tools, memory=memory))
        pictures = [
            ("pictures", ("large", picture(size=(20, 20)))),
            *files("blue", count=1),
        ]
        found = TestClient(make_app(strict)).post("/teach?name=blue", files=pictures).json()
        assert found["pictures"] == 1
        assert found["errors"][0]["name"] == "large"
        assert "above the limit of 100 pixels" in found["errors"][0]["error"]


def test_what_was_taught_is_kept_as_a_bundle(taught, tmp_path):
    house, client = taught
    house.places["tiny"] = tmp_path / "kept"
    client.post("/teach?name=blue", files=files("blue"))
    kept = vitrail.Predictor(tmp_path / "kept", device="cpu")
    assert kept(picture("blue", seed=90)).label == "blue"
    assert (tmp_path / "kept" / "probe.safetensors").exists()  # it can go on learning
    (tmp_path / "file").write_text("")
    house.places["tiny"] = tmp_path / "file" / "below"
    before = house.shelf.get(None)
    refused = client.post("/teach?name=gray", files=files("red"))
    assert refused.status_code == 503
    assert str(tmp_path) not in refused.text
    assert house.shelf.get(None) is before


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kept", [True, False])
def test_a_lesson_that_cannot_be_written_leaves_the_folder_as_it_was(
    taught, tmp_path, monkeypatch, kept
):
    house, client = taught
    folder = house.places["tiny"] = tmp_path / "kept"
    folder.mkdir()
    if kept:
        assert client.post("/teach?name=blue", files=files("blue")).status_code == 200
        (folder / "notes.txt").write_text("of somebody else")
    before, served = contents(folder), house.shelf.get(None)

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lessons, "save", full)  # after the memory was written
        assert client.post("/teach?name=gray", files=files("red")).status_code == 503
    assert contents(folder) == before
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").mkdir()  # the last file but one cannot be moved in
    before = contents(folder)
    refused = client.post("/teach?name=gray", files=files("red"))
    assert refused.status_code == 503
    assert "was not learned" in refused.json()["error"]
    assert contents(folder) == before
    assert {path.name for path in folder.iterdir()} == {*before, "config.json"}
    assert house.shelf.get(None) is served
    (folder / "config.json").rmdir()
    assert client.post("/teach?name=gray", files=files("red")).status_code == 200
    assert "gray" in vitrail.Predictor(folder, device="cpu").classes


def test_a_model_that_cannot_be_served_is_not_kept(taught, tmp_path, monkeypatch):
    house, client = taught
    folder = house.places["tiny"] = tmp_path / "kept"

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(lessons, "Predictor", fails)
    assert client.post("/teach?name=blue", files=files("blue")).status_code == 500
    assert not folder.exists()


def test_a_lesson_by_an_abandoned_thread_does_not_undo_a_later_one(taught):
    """It began before the other one, and comes back after it."""
    house, client = taught
    stuck, begun, release = house.shelf.get(None), threading.Event(), threading.Event()
    refused = []

    def late(model, memory, taught):
        begun.set()
        assert release.wait(20)
        return teaching.fitted(model, memory, taught=taught)

    def teach_late():
        images = [house.readers.submit(picture("red"), stuck.answering.prepare)]
        uploads = [Upload("x", picture("red"))]
        try:
            lessons.teach(house.shelf, "tiny", "gray", uploads, images, None)
        except Refusal as refusal:
            refused.append(refusal.status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lessons, "fitted", late)
        thread = threading.Thread(target=teach_late)
        thread.start()
        assert begun.wait(20)
    assert client.post("/teach?name=blue", files=files("blue")).status_code == 200
    release.set()
    thread.join(20)
    assert refused == [503]
    assert client.get("/model").json()["classes"] == ["red", "green", "blue"]


def test_the_first_class_of_a_model_that_knows_none_waits_for_the_second():
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    with a_house({"bare": model}, teach=True) as house:
        served = house.shelf.get(None)
        memory, notes = lessons.ready(served.predictor, "bare", None)
        assert notes == []
        house.add(Served("bare", served.predictor, house.tools, memory=memory))
        client = TestClient(make_app(house))
        first = client.post("/teach?name=red", files=files("red")).json()
        assert "teach another one" in first["notes"][0]
        second = client.post("/teach?name=blue", files=files("blue")).json()
        assert second["classes"] == ["red", "blue"]
        told = house.shelf.get(None).predictor.metadata.provenance
        assert told["taught"] == ["red", "blue"]  # by pictures that nobody will know again
        answer = client.post("/predict", content=picture("blue", seed=90)).json()["answers"][0]
        assert answer["label"] == "blue"


def test_a_trained_model_is_reminded_by_its_data_before_it_is_served(tmp_path):
    data = write_colors(tmp_path / "colors.npz", train=30, test=6)
    tiny_run(data, tmp_path / "run", steps=2)
    predictor = vitrail.Predictor(tmp_path / "run", device="cpu")
    memory, notes = lessons.ready(predictor, str(tmp_path / "run"), None)
    assert memory.classes == CLASSES
    assert "30 pictures of the 3 classes" in notes[0]
    data.unlink()
    with pytest.raises(ConfigError, match="--using"):
        lessons.ready(predictor, str(tmp_path / "run"), None)


def test_lessons_are_kept_in_the_place_of_no_model_but_one_that_remembers(tmp_path):
    vitrail.save(tiny_model(), tmp_path / "one")
    vitrail.save(tiny_model(), tmp_path / "other")
    with pytest.raises(ConfigError, match="other holds a model already"):
        lessons.place_for(tmp_path / "other", "one", str(tmp_path / "one"), several=False)
    with pytest.raises(ConfigError, match=r"one has no probe\.safetensors.*--teach-to another"):
        lessons.place_for(tmp_path / "one", "one", str(tmp_path / "one"), several=False)
    values = np.zeros((2, tiny_model().config.num_features), np.float32)
    save_memory(remember(tiny_model(), values, np.arange(2), ("red", "green")), tmp_path / "one")
    own = lessons.place_for(tmp_path / "one", "one", f"{tmp_path}/one/", several=False)
    assert own == tmp_path / "one"
    free = lessons.place_for(tmp_path / "new", "one", str(tmp_path / "one"), several=True)
    assert free == tmp_path / "new" / "one"
    assert lessons.place_for(None, "one", "one", several=False) is None
