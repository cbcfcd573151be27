import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail
from tiny_models import awake
from tiny_runs import CLASSES, write_colors
from vitrail.checkpoints.metadata import get_metadata
from vitrail.cli import main
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evaluation import conformal as module
from vitrail.evaluation.conformal import (
    METHODS,
    abstention_threshold,
    binomial_cdf,
    conformal_quantile,
)
from vitrail.export.torch_program import describe_model
from vitrail.probing import ridge
from vitrail.probing.features import features_of

# Sets of TorchCP 1.2.1 (randomized=False, RAPS with penalty=0.1 and kreg=0) for 60 images, at error
# rates of 10 % and 20 %: bool (60, 6), packed. MAPIE 1.6.0 gives the same for lac.
TORCHCP = {
    "lac": (
        "084c03610d1932044f16a822225421984dd3bca0e58261f84dc32098870d856057a846108e4452426c85705725",
        "084c0361010932040a1628022244219849831ca0c58220f0498120888305854052a846108a4450426c81704725",
    ),
    "aps": (
        "08fe13611d5b12074f96f872335431b84dd33fa1f58261f84dcb22d8879d8566d6a876148f6c52466d81704325",
        "004803200d0910064e16e8222250209809c33ea0f50221f049c10088070d054256a862108e6450406c81304305",
    ),
    "raps": (
        "0cde13651d19b3864e96e972725c719a49d33ea1e5c261f84dcb2698a70d856656a877348e6c72c66c85707725",
        "08cc0361050912044e16a8223244219849831ca0e58220f049832088830d054252a062148a4452406c01304305",
    ),
}


def draw(rng, samples, classes, scale=2):
    """Probabilities, and labels drawn from them."""
    logits = scale * rng.normal(size=(samples, classes))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p, (rng.random((samples, 1)) > p.cumsum(axis=1)).sum(axis=1).clip(0, classes - 1)


def true_scores(p, labels, method):
    return module.class_scores(p, method)[np.arange(len(labels)), labels]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [0, 1])
def test_sets_equal_torchcp(method, number):
    rng = np.random.default_rng(7)
    (p, labels), (new, _) = draw(rng, 150, 6), draw(rng, 60, 6)
    threshold = conformal_quantile(true_scores(p, labels, method), (0.1, 0.2)[number])
    expected = np.unpackbits(np.frombuffer(bytes.fromhex(TORCHCP[method][number]), np.uint8))
    np.testing.assert_array_equal(
        module.class_scores(new, method) <= threshold, expected.reshape(60, 6)
    )


@pytest.mark.parametrize("method", METHODS)
def test_coverage_is_exact_over_many_calibrations(method):
    """Mean coverage k / (n + 1) to 4 standard errors, and the spread of a beta distribution."""
    rng = np.random.default_rng(0)
    scores = true_scores(*draw(rng, 40_000, 5), method).reshape(200, 200)
    covered = []
    for row in scores:
        threshold = conformal_quantile(row[:100], 0.1)
        covered.append((row[100:] <= threshold).mean())
    expected = math.ceil(101 * 0.9) / 101
    spread = math.sqrt(2 * expected * (1 - expected) / 100)  # of calibration and test images
    assert abs(np.mean(covered) - expected) < 4 * spread / math.sqrt(200)
    assert np.std(covered) == pytest.approx(spread, rel=0.2)


def test_abstention_keeps_the_error_rate_and_accepts_what_it_can():
    rng = np.random.default_rng(0)
    population = draw(rng, 20_000, 4, scale=6)[0].max(axis=1)
    violated, accepted = 0, []
    for _ in range(200):
        p, labels = draw(rng, 400, 4, scale=6)
        correct = p.argmax(axis=1) == labels
        confidence = p.max(axis=1)
        threshold = abstention_threshold(confidence, correct, 0.1)
        # Labels are drawn from p, so the risk is the mean of 1 - confidence.
        answered = population >= (2 if threshold is None else threshold)
        violated += answered.any() and 1 - population[answered].mean() > 0.1
        accepted.append(answered.mean())
    assert violated <= 10 + 3 * math.sqrt(10)
    assert np.mean(accepted) > 0.75
    assert abstention_threshold(np.linspace(0, 1, 400), np.zeros(400, bool), 0.1) is None
    assert abstention_threshold(np.linspace(0, 1, 400), np.ones(400, bool), 0.1) == 0


def test_too_few_images_are_refused():
    assert module.images_needed(0.05) == 19
    assert conformal_quantile(np.arange(19.0), 0.05) == 18
    with pytest.raises(DataError, match="needs at least 19 calibration images, got 18"):
        conformal_quantile(np.arange(18.0), 0.05)
    assert abstention_threshold(np.ones(50), np.ones(50, bool), 0.05) is None  # 59 are needed
    for error_rate, needed in ((0.05, 59), (0.1, 29), (0.01, 299)):
        assert module.correct_needed(error_rate) == needed
        assert binomial_cdf(0, needed, error_rate) <= 0.05 < binomial_cdf(0, needed - 1, error_rate)


def test_binomial_bounds_equal_published_values():
    assert module.binomial_cdf(3, 10, 0.5) == pytest.approx(176 / 1024)
    assert module.binomial_cdf(10, 10, 0.3) == 1
    assert module.clopper_pearson(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert module.clopper_pearson(3, 100) == pytest.approx(0.0757, abs=1e-4)
    low, high = module.coverage_range(1000, 0.1)  # Angelopoulos & Bates 2021, figure 11
    assert (low, high) == pytest.approx((0.884, 0.915), abs=2e-3)


def test_drift_warns_only_if_confidences_change():
    rng = np.random.default_rng(0)
    p, _ = draw(rng, 1000, 4)
    confidence = p.max(axis=1)
    edges = np.quantile(confidence, np.linspace(0, 1, 11)[1:-1])
    known = {"method": "lac", "error_rate": 0.1, "samples": 1000, "thresholds": (0.9,)}
    conformal = module.Conformal(edges=tuple(edges), shares=(0.1,) * 10, **known)
    same = [conformal.drift(draw(rng, 300, 4)[0].max(axis=1)) for _ in range(200)]
    assert sum(map(bool, same)) <= 2
    assert "calibrate again" in conformal.drift(confidence[:300] ** 1.5)
    assert not conformal.drift(confidence[:40] ** 9)  # too few to tell


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A model that is right on most images of a dataset, and its bundle."""
    folder = tmp_path_factory.mktemp("conformal")
    data = write_colors(folder / "colors.npz", test=240)
    sizes = {"width": 8, "mlp_width": 16, "heads": 2, "patch_size": 4, "image_size": 8}
    vitrail.save(awake(vitrail.VitConfig(depth=1, num_classes=3, **sizes)), folder / "raw")
    model = vitrail.load(folder / "raw")
    features = features_of(model, vitrail.open_dataset(data, "train"), cache=False)
    path = ridge.fit_path(features.values, features.labels)
    weight, bias = path.probes[path.best].linear(path.scale)
    model.head.weight.data, model.head.bias.data = weight.float(), bias.float()
    vitrail.save(model, folder / "model", class_names=CLASSES)
    return folder, data


def test_calibrate_stores_sets_that_predict_and_python_use(calibrated, capsys):
    folder, data = calibrated
    out = folder / "calibrated"
    command = ["calibrate", str(folder / "model"), str(data), "--out", str(out)]
    assert main([*command, "--error-rate", "0.1", "--method", "raps", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["samples"] == 240
    assert values["images_needed"] == 9
    assert values["accepted_error_bound"] <= 0.1
    predictor = vitrail.Predictor(out)
    test = vitrail.open_dataset(data, "test")
    predictions = predictor([test[i].data for i in range(240)], top=3)
    covered = [
        test.classes[test[i].label] in one.prediction_set for i, one in enumerate(predictions)
    ]
    assert np.mean(covered) >= 0.9
    for one in predictions:
        assert one.prediction_set[0] == one.guesses[0].label
        assert bool(one.labels) == (one.probability >= values["abstain"][0])
    assert main([*command[:3], "--error-rate", "0.005"]) == 0  # 240 images
    assert "needs 598 accepted predictions that are all" in " ".join(
        capsys.readouterr().out.split()
    )
    assert predictor(test[0].data, threshold=0.0).labels  # an explicit threshold wins
    assert main(["calibrate", str(out), str(data), "--error-rate", "0.1", "--per-class"]) == 0
    assert "per class" in capsys.readouterr().out


def test_order_of_the_classes_in_the_dataset_does_not_matter(calibrated, capsys):
    folder, data = calibrated
    arrays = dict(np.load(data))
    arrays["class_names"] = arrays["class_names"][::-1]
    arrays |= {name: 2 - arrays[name] for name in ("y_train", "y_test")}
    np.savez(folder / "reversed.npz", **arrays)
    options = ["--error-rate", "0.2", "--method", "aps", "--per-class", "--json"]
    expected, values = [], []
    for path, results in ((data, expected), (folder / "reversed.npz", values)):
        assert main(["calibrate", str(folder / "model"), str(path), *options]) == 0
        results.append(json.loads(capsys.readouterr().out))
        del results[0]["data"]
    assert len(set(expected[0]["thresholds"])) == 3
    assert values == expected
    # The same classes under other names: the second model's are those of the dataset.
    vitrail.save(vitrail.load(folder / "model"), folder / "renamed", class_names=list("abc"))
    for model, by_order in (("renamed", True), ("model", False)):
        _, conformal, _ = vitrail.calibrate(folder / model, data, by_order=by_order)
        assert conformal.samples == 240
    with pytest.raises(ConfigError, match="leave out flip, crops and restrict"):
        vitrail.calibrate(folder / "model", data, flip=True)
    with pytest.raises(DataError, match="or loss is sigmoid"):
        vitrail.calibrate(folder / "model", data, loss="sigmoid")


@pytest.mark.slow
def test_thresholds_are_exported_and_dropped_when_the_head_changes(calibrated, caplog):
    folder, data = calibrated
    model, conformal, _ = vitrail.calibrate(folder / "model", data, error_rate=0.1)
    assert vitrail.Predictor(model).conformal == conformal
    vitrail.export_model(model, folder / "calibrated.onnx")
    assert vitrail.Predictor(folder / "calibrated.onnx").conformal == conformal
    with torch.no_grad():
        model.head.weight *= 2
    assert vitrail.Predictor(model).conformal is None
    assert "conformal" not in describe_model(model)
    caplog.clear()
    vitrail.export_model(model, folder / "changed.onnx")
    assert len(warnings_of(caplog)) == 1
    assert vitrail.Predictor(folder / "changed.onnx").conformal is None


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == module.logger.name]


@pytest.fixture
def thresholds(calibrated):
    """A model with thresholds, and its bundle."""
    folder, data = calibrated
    model, conformal, _ = vitrail.calibrate(folder / "model", data, error_rate=0.1)
    vitrail.save(model, folder / "fits")
    return model, conformal, folder / "fits"


@pytest.mark.parametrize(
    "change",
    [
        {"merge": 1},
        {"numerics": "timm"},
        {"image_size": 12},
        {"preprocessing": "deit"},
        {"num_classes": 5},
        {"backbone": 2.0},
        {"head": 2.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_thresholds_of_other_probabilities_are_ignored_with_one_warning(thresholds, caplog, change):
    _, conformal, bundle = thresholds
    assert vitrail.Predictor(bundle).conformal == conformal
    compiled = torch.compile(vitrail.load(bundle), backend="eager")
    assert vitrail.Predictor(compiled).conformal == conformal
    assert not warnings_of(caplog)
    scale = {name: change.pop(name) for name in ("backbone", "head") if name in change}
    merge = {name: change.pop(name) for name in ("merge",) if name in change}
    model = vitrail.load(bundle, **change)
    with torch.no_grad():
        if "backbone" in scale:
            model.stem.projection.weight *= scale["backbone"]
        if "head" in scale:
            model.head.weight *= scale["head"]
    assert vitrail.Predictor(model, **merge).conformal is None
    (message,) = warnings_of(caplog)
    assert "thresholds of prediction sets and abstention are ignored: the weights" in message
    assert "run `vitrail calibrate` again" in message


def test_thresholds_of_a_model_calibrated_with_merging_need_it(thresholds, calibrated):
    model, *_ = thresholds
    model.merge = 1
    vitrail.calibrate(model, calibrated[1], error_rate=0.1)
    assert vitrail.Predictor(model).conformal is not None
    assert vitrail.Predictor(model, merge=0).conformal is None


def test_thresholds_do_not_apply_to_int8(thresholds, caplog):
    model, conformal, bundle = thresholds
    assert vitrail.Predictor(bundle, engine="onnx").conformal == conformal
    guard = vitrail.AccuracyGuard(max_drop=1)
    assert not warnings_of(caplog)
    assert vitrail.Predictor(bundle, engine="onnx-int8", guard=guard).conformal is None
    (message,) = warnings_of(caplog)
    assert "int8 changes the probabilities" in message
    assert "conformal" not in describe_model(model, int8=True)


def test_thresholds_without_a_digest_of_the_model_are_ignored(thresholds, caplog):
    """Those of development versions stored only a digest of the head."""
    model, conformal, _ = thresholds
    values = conformal.to_dict() | {"head": conformal.digest}
    del values["digest"]
    model.metadata = replace(get_metadata(model), conformal=values)
    assert vitrail.Predictor(model).conformal is None
    assert "calibrate` again" in caplog.text


def test_targets_that_the_data_cannot_support_are_refused(calibrated):
    folder, data = calibrated
    with pytest.raises(DataError, match=r"0\.1 %.* at least 999 calibration images, got 240"):
        vitrail.calibrate(folder / "model", data, error_rate=0.001)
    with pytest.raises(DataError, match="at least 99 calibration images of each; 'red'"):
        vitrail.calibrate(folder / "model", data, error_rate=0.01, per_class=True)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        vitrail.calibrate(folder / "model", data, error_rate=5)


def test_broken_thresholds_are_a_checkpoint_error(calibrated):
    folder, data = calibrated
    model, conformal, _ = vitrail.calibrate(folder / "model", data, error_rate=0.1)
    for change in ({"method": "x"}, {"thresholds": [1, 2]}, {"samples": "9"}, {"edges": None}):
        broken = conformal.to_dict() | change
        model.metadata = replace(get_metadata(model), conformal=broken)
        with pytest.raises(CheckpointError, match="calibrate again"):
            vitrail.Predictor(model)
