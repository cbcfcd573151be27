"""The page of `--to html`: its arithmetic, and the page itself, opened from disk and offline."""

import base64
import csv
import io
import json
import random
import re
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from exportable import CONFIGS
from PIL import Image
from safetensors.torch import load_file

from browser_tab import CHROMIUM, NEEDS_CHROMIUM, Tab, started, until, until_text
from tiny_models import awake
from vitrail import Predictor, export_model, load, save, teach
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import PRESETS, Preprocessing, preset
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.errors import CheckpointError
from vitrail.evaluation.conformal import Conformal, model_digest
from vitrail.export.html import WORKER
from vitrail.export.kernel_program import BASE as FIRST_ADDRESS
from vitrail.export.kernel_program import compile_model
from vitrail.export.session import open_session
from vitrail.probing.teach import ProbeMemory, fit_head

sys.path.append(str(Path(__file__).parents[1] / "data"))  # the hostile images

pytestmark = pytest.mark.slow

WASM = resources.files("vitrail") / "export" / "browser" / "kernels.wasm"
KERNELS = base64.b64encode(WASM.read_bytes()).decode()
NAMES = ("sun", "moon", "star")
# One kind for each operation that has a kernel, or a case of its own.
KINDS = ["distillation", "map", "swiglu", "relative, registers", "conv stem", "gray", "hybrid"]
KINDS += ["BiT", "Mixer", "2-D, every layer", "registers and mean", "not square"]
KINDS += ["axial", "AxialResNet", "rotary"]
SIZES = ((64, 48), (31, 97), (20, 20), (9, 14), (200, 130))
BYTES = "(text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def scripts(browser):
    """A blank page with the functions of the worker."""
    page = browser.new_page()
    for name in WORKER[:-1]:
        page.add_script_tag(content=(resources.files("vitrail") / name).read_text())
    page.evaluate(f"window.bytes = {BYTES}")
    return page


def text_of(content):
    return base64.b64encode(content).decode()


def encoded(pixels, kind="PNG", **settings):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **settings)
    return buffer.getvalue()


def photo(height, width, seed=0):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 9
    waves = [128 + 90 * np.sin(x * rng.uniform(0.3, 2) + y * rng.uniform(0.3, 2)) for _ in range(3)]
    return (np.stack(waves, axis=-1) + rng.integers(-30, 30, (height, width, 3))).astype(np.uint8)


def model_with_classes(kind="class token", size=8, **changes):
    config = CONFIGS[kind].change(**changes)
    model = awake(config)
    how = preset("deit", (size, size), config.channels)
    model.metadata = Metadata(preprocessing=how, class_names=NAMES)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_onnxruntime_computes(kind, scripts):
    program = compile_model(awake(CONFIGS[kind]), int8=kind == "swiglu")
    images = torch.randn(program.tensors["images"][1:], generator=torch.Generator().manual_seed(1))
    session = open_session(program.onnx)
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, {"images": images.numpy()}), strict=True))
    fields = program._asdict()
    plain = {key: fields[key] for key in ("calls", "constants", "tensors", "memory")}
    outputs = scripts.evaluate(
        """async ([wasm, weights, program, images, first]) => {
          const { instance } = await WebAssembly.instantiate(bytes(wasm),
            { env: { memory: new WebAssembly.Memory({ initial: 4 }) } });
          if (instance.exports.__heap_base.value > first) throw new Error("kernels need more room");
          const engine = await Engine.create(bytes(wasm), bytes(weights), program);
          engine.run(images.map(() => 1)); // nothing is left over from another image
          const outputs = engine.run(images);
          return Object.fromEntries(Object.entries(outputs).map(([k, v]) => [k, [...v]]));
        }""",
        [KERNELS, text_of(program.weights), plain, images.flatten().tolist(), FIRST_ADDRESS],
    )
    assert outputs.keys() == expected.keys()
    for key, values in expected.items():
        assert np.allclose(outputs[key], values.ravel(), rtol=0, atol=1e-5 * np.abs(values).max())


def configs():
    yield from ((name, preset(name, (24, 24))) for name in PRESETS)
    for name in ("lanczos", "bicubic", "nearest"):
        how = {"interpolation": name, "antialias": name == "lanczos"}
        yield name, Preprocessing(size=(20, 30), **how)
    yield "padded", Preprocessing(size=(40, 40), resize="short-side", resize_to=(16, 16))
    yield "oblong", preset("timm", (24, 36))
    yield "gray", Preprocessing(size=(16, 16), mean=(0.4,), std=(0.3,))


@pytest.mark.parametrize(
    ("name", "how"), list(configs()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_preprocessing_equals_pythons(name, how, scripts):
    transform = EvalTransform(preprocessing=how, channels=len(how.mean))
    exact = how.antialias and how.interpolation != "area"
    for height, width in SIZES:
        data = encoded(photo(height, width))
        expected = normalize(transform(data)[None], how)[0].numpy().ravel()
        values = scripts.evaluate(
            """async ([data, how, channels]) =>
              [...preprocess(await decode(new Blob([bytes(data)])), how, channels).values]""",
            [text_of(data), how.to_dict(), len(how.mean)],
        )
        steps = np.abs(np.array(values) - expected) * 255
        steps *= np.repeat(how.std, how.size[0] * how.size[1])
        assert steps.max() < (1e-3 if exact else 1.001), (height, width)
        assert (steps > 0.5).mean() < (1e-9 if exact else 0.015)  # torch's float32


def test_images_of_every_kind_decode_to_the_right_pixels(scripts):
    """All EXIF orientations, CMYK, 16 bits, palettes, transparency on white, first frames."""
    from odd_images import odd_images

    unknown = re.compile("tiff|bmp run-length|webp orientation")
    odd = {name: each for name, each in odd_images().items() if not unknown.match(name)}
    script = """(files) => Promise.all(files.map(async (file) => {
      const { data, width, height } = await decode(new Blob([bytes(file)]));
      return [height, width, [...data]]; }))"""
    images = scripts.evaluate(script, [text_of(each.data) for each in odd.values()])
    for (name, each), (height, width, values) in zip(odd.items(), images, strict=True):
        pixels = np.array(values).reshape(height, width, 4)[..., :3]
        # Chromium 156 converts the colors of animated AVIF with other coefficients.
        tolerance = 20 if name == "avif animated" else max(each.tolerance, 1)
        assert each.difference(pixels) <= tolerance, name
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    jpeg = odd["jpeg"].data
    # Chromium's time is quadratic in segments.
    segments = jpeg[:2] + 2000 * b"\xff\xe1\0\x02" + jpeg[2:]
    for data in (b"", svg, b"GIF89a", segments):
        message = scripts.evaluate(
            "(data) => decode(new Blob([bytes(data)])).catch((error) => error.message)",
            text_of(data),
        )
        assert message.startswith("it is damaged, or of a format that this browser does not know")


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("counts", [(3, 3, 3), (7, 7), (14, 13, 13), (1, 1, 1), (3, 20), (1, 2, 9)])
def test_ridge_head_equals_pythons(counts, compressed, scripts):
    """More and fewer rows than the 16 features; one row for each class; imbalanced classes."""
    count, classes = sum(counts), len(counts)
    rng = np.random.default_rng(count)
    labels = np.repeat(np.arange(classes), counts)
    rows = (rng.normal(size=(count, 16)) + labels[:, None] * rng.normal(size=16)).astype(np.float32)
    model = model_with_classes()
    memory = ProbeMemory.of(model, rows, labels, [f"class {i}" for i in range(classes)])
    if compressed:
        memory = fit_head(model, memory)[1].compressed()
    taught, chosen, held_out = fit_head(model, memory)
    tensors = {key: getattr(memory, key).tolist() for key in ("counts", "owners", "rows", "sums")}
    plain = tensors | {"width": 16, "l2": memory.l2, "temperature": memory.temperature}
    fitted = scripts.evaluate(
        """(memory) => { const { memory: chosen, head, accuracy, balanced } = fitHead(memory);
          return [chosen.l2, chosen.temperature, [accuracy, balanced],
            head.weight.map((row) => [...row]), [...head.bias]]; }""",
        plain,
    )
    assert fitted[0] == chosen.l2
    assert fitted[1] == pytest.approx(chosen.temperature, rel=1e-7)
    assert fitted[2] == pytest.approx([None, None] if held_out is None else [*held_out])
    head = taught.head
    largest = float(head.weight.detach().abs().max())
    assert np.abs(np.array(fitted[3]) - head.weight.detach().numpy()).max() < 1e-6 * largest
    assert np.allclose(fitted[4], head.bias.detach().numpy(), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = model_with_classes(size=16, image_size=16, depth=3)
    bins = {"abstain": (0.6,), "edges": (0.5,), "shares": (0.5, 0.5), "digest": model_digest(model)}
    limits = (0.7, 1.052, 1.21)  # all three sum to 1.2, give or take rounding
    calibrated = Conformal(method="raps", error_rate=0.1, samples=50, thresholds=limits, **bins)
    model.metadata = replace(model.metadata, conformal=calibrated.to_dict())
    path = tmp_path_factory.mktemp("page") / "classifier.html"
    return model, export_model(model, path, to="html")


@pytest.fixture(scope="module")
def shared(browser):
    return Tab(browser, offline=True, accept_downloads=True)


@pytest.fixture
def page(shared, exported):
    with shared.at(exported[1].path.as_uri(), "") as page:
        until_text(page, "headline", "classes")
        until_text(page, "about", "^classifier · ")
        page.evaluate(f"window.bytes = {BYTES}")
        yield page


def give(page, to, *images):
    kind = {"mimeType": "image/png"}
    files = [{"name": f"{n}.png", "buffer": data, **kind} for n, data in enumerate(images)]
    page.locator(to).set_input_files(files)


def teach_classes(page, images):
    """Add classes in the form of the page, which is open."""
    for name, files in images.items():
        page.locator("#lesson").fill(name)
        give(page, "#lessons", *files)
        page.locator("#teach form button").click()
        until_text(page, "learned", f"^Added “{name}”")


def photos_of(*classes):
    return {name: [encoded(photo(20, 20, seed + i)) for i in range(3)] for name, seed in classes}


def download(page, button, path):
    """Save what a button gives; return the name that it suggests."""
    with page.expect_download() as started:
        page.get_by_text(button).click()
    started.value.save_as(path)
    return started.value.suggested_filename


def assert_close(head, expected, tolerance):
    """Compare the tensors of a downloaded head to a model's, relative to the largest value."""
    for key in ("weight", "bias"):
        values = getattr(expected.head, key).detach()
        assert (head[key] - values).abs().max() < tolerance * values.abs().max()


@NEEDS_CHROMIUM
def test_page_predicts_what_the_predictor_predicts(page, exported):
    images = [encoded(photo(20 + i, 40 - i, seed=i)) for i in range(12)]
    predictions = Predictor(exported[0])(images, top=3)
    with page.expect_download() as download:
        give(page, "#many", *images, b"no image at all")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [row["label"] for row in rows[:-1]] == [prediction.label for prediction in predictions]
    assert rows[-1]["error"].startswith("it is damaged")
    sets = [prediction.prediction_set for prediction in predictions]
    assert [tuple(row["prediction_set"].split("; ")) for row in rows[:-1]] == sets
    assert len({len(members) for members in sets}) > 1
    assert "" in {row["label"] for row in rows[:-1]} != {""}  # it abstains from some
    for row, prediction in zip(rows, predictions, strict=False):
        for guess in prediction.guesses:
            assert float(row[guess.label]) == pytest.approx(guess.probability, abs=2e-3)
    give(page, "#files", images[0])
    until_text(page, "facts", "engine WebAssembly")
    assert page.locator("#guesses .name").first.text_content() == predictions[0].guesses[0].label
    assert "(error rate 10 %)" in page.locator("#sentence").text_content()


@NEEDS_CHROMIUM
def test_photos_and_pasted_images_are_classified(page):
    page.locator("#photograph").click()
    until(page, "document.querySelector('video').videoWidth > 0")
    page.get_by_text("Take the photo").click()
    until_text(page, "facts", "engine WebAssembly")
    assert page.evaluate("document.querySelector('video').srcObject.active") is False
    page.evaluate(
        """(data) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes(data)], "pasted.png", { type: "image/png" }));
          document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer }));
        }""",
        text_of(encoded(photo(20, 30))),
    )
    until(page, "document.querySelectorAll('#strip button').length === 2")
    until_text(page, "facts", "engine WebAssembly")
    assert page.locator("#picture").get_attribute("alt") == "pasted.png"


@pytest.mark.parametrize("kind", ["class token", "mean", "map"])
def test_attention_equals_the_servers(kind, browser, tmp_path):
    from vitrail.serving.registry import attention, load_view

    model = model_with_classes(kind)
    path = export_model(model, tmp_path / "page.html", to="html").path
    data = encoded(photo(12, 21))
    expected = json.loads(attention(model, load_view(model, data)).model_dump_json())
    with Tab(browser, offline=True).at(path.as_uri(), "") as page:
        shown = page.evaluate(
            f"""async (data) => {{
              await vitrail.loaded;
              const blob = new Blob([({BYTES})(data)]);
              return vitrail.run("attention", {{ key: 1, blob }});
            }}""",
            text_of(data),
        )
    keys = ("grid", "layers", "heads", "lag")
    assert [shown[key] for key in keys] == [expected[key] for key in keys]
    assert np.allclose(shown["box"], expected["box"], atol=1e-4)
    assert np.allclose(shown["peaks"], expected["peaks"], atol=2e-3)
    for key in ("maps", "rollout"):
        values = [np.frombuffer(base64.b64decode(x[key]), np.uint8) for x in (shown, expected)]
        assert np.abs(values[0].astype(int) - values[1]).max() <= 3


@NEEDS_CHROMIUM
def test_taught_classes_are_in_the_downloaded_page_and_head(page, exported, browser, tmp_path):
    images = photos_of(("red", 0), ("blue", 50), ("=cmd", 90))
    page.locator("#teach summary").click()
    teach_classes(page, images)
    script = """async (data) => (await vitrail.classify(new Blob([bytes(data)])))"""
    before = page.evaluate(script, text_of(images["blue"][0]))
    assert {guess["label"] for guess in before} == set(images)
    for button, name in (("this page", "taught.html"), ("the head", "probe.safetensors")):
        assert download(page, f"Download {button}", tmp_path / name) == name
    save(exported[0], tmp_path / "bundle")
    probe = tmp_path / "probe.safetensors"
    result = teach(tmp_path / "bundle", {}, tmp_path / "again", using=probe)
    assert result.classes == tuple(images)
    assert_close(load_file(probe), load(result.folder), 1e-6)
    other_weights = model_with_classes()
    other_weights.metadata = exported[0].metadata
    save(other_weights, tmp_path / "other")
    with pytest.raises(CheckpointError, match="made with other weights"):
        teach(tmp_path / "other", {}, tmp_path / "none", using=probe)
    export_model(result.folder, tmp_path / "again.html", to="html")
    for name, tolerance in (("taught", 0), ("again", 5e-3)):
        with Tab(browser, offline=True).at((tmp_path / f"{name}.html").as_uri(), "") as other:
            until_text(other, "headline", "^3 classes$")
            other.evaluate(f"window.bytes = {BYTES}")
            after = other.evaluate(script, text_of(images["blue"][0]))
            assert [guess["label"] for guess in after] == [guess["label"] for guess in before]
            for a, b in zip(after, before, strict=True):
                assert a["probability"] == pytest.approx(b["probability"], abs=tolerance)
            other.locator("#teach summary").click()
            teach_classes(other, {"green": images["red"]})
            until_text(other, "headline", "^4 classes$")


@NEEDS_CHROMIUM
def test_backbone_without_classes_is_taught_in_the_page(browser, tmp_path):
    """As of `builtin:vit-photos`: a convolutional stem, class token and mean, float16 weights."""
    config = CONFIGS["conv stem"].change(pool="cls+mean", num_classes=0, depth=2)
    backbone, probe = tmp_path / "backbone", tmp_path / "probe.safetensors"
    save(awake(config), backbone, dtype=torch.float16)
    export_model(backbone, tmp_path / "page.html", to="html")
    images = photos_of(("red", 0), ("blue", 50))
    with Tab(browser, offline=True).at((tmp_path / "page.html").as_uri(), "") as page:
        until_text(page, "headline", "^No classes yet$")
        assert page.locator("#batch").is_hidden()
        give(page, "#files", images["red"][0])
        until_text(page, "sentence", "There are no classes yet; add two below.")
        teach_classes(page, images)
        until_text(page, "headline", "red")  # the image is classified again
        assert page.locator("#batch").is_visible()
        download(page, "Download the head", probe)
    files = {name: [] for name in images}
    for name, contents in images.items():
        for number, content in enumerate(contents):
            files[name].append(tmp_path / f"{name}-{number}.png")
            files[name][-1].write_bytes(content)
    python = load(teach(backbone, files, tmp_path / "taught").folder)
    same = load(teach(backbone, {}, tmp_path / "same", using=probe).folder)
    rows = load_file(tmp_path / "taught" / "probe.safetensors")["rows"]
    shown = load_file(probe)
    assert (shown["rows"] - rows).abs().max() < 1e-4 * rows.abs().max()  # the same weights
    assert_close(shown, same, 1e-6)
    assert_close(shown, python, 1e-3)


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_hostile_images_never_break_the_page(page):
    from hostile_images import hostile_images
    from image_mutations import mutate
    from odd_images import odd_images

    rng, whole = random.Random(0), [odd.data for odd in odd_images().values()]
    mutated = [mutate(rng.choice(whole), whole, rng)[1] for _ in range(60)]
    files = [*rng.sample(list(hostile_images().values()), 12), *mutated]  # some take a second
    script = """async (data) => {
      try { return (await vitrail.classify(new Blob([bytes(data)]))).length; }
      catch (error) { return error.final ? error.message : "bug: " + error; }
    }"""
    for number, data in enumerate(files):
        answer = page.evaluate(script, text_of(data))
        assert answer == 3 or not answer.startswith("bug"), (number, answer)
    give(page, "#files", encoded(photo(9, 9)))
    until_text(page, "facts", "engine WebAssembly")


def test_page_requests_nothing_and_names_no_host(exported):
    text = exported[1].path.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "connect-src" not in policy
    assert policy.startswith("default-src 'none'; ")
    assert set(re.findall(r"//([\w-]+\.[a-z]{2,4})\b", text)) <= {"www.w3"}
    assert exported[1].bytes < 400_000
    assert exported[1].difference < 5e-3
