"""Conformal prediction sets and a risk-controlled abstention threshold: `vitrail.calibrate`.

A prediction set contains the true class with probability at least 1 - error rate (split conformal
prediction). A class is in the set if its score is at most a threshold, which is a quantile of the
scores of the true classes of n calibration images:

    lac     1 - p                                     Sadinle et al. 2019 (arXiv:1609.00451)
    aps     sum of p down to this class               Romano et al. 2020 (arXiv:2006.02544)
    raps    aps + 0.1 for each class above it         Angelopoulos et al. 2021 (arXiv:2009.14193)

The scores are not randomized, so that an image always gets the same set. The abstention threshold
is found by fixed-sequence testing (Angelopoulos et al. 2021, arXiv:2110.01052) with exact binomial
p-values. Both assume that new images are exchangeable with the calibration images: drawn from the
same distribution, and not used for training. `Conformal.drift` detects a shift of the confidences.

Shapes: N images, K classes.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from typing import Any, Literal

import numpy as np

from vitrail.checkpoints.bundle import digest
from vitrail.checkpoints.load import HEADS, Reference, backbone_digest, load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.checkpoints.rules import unwrap_model
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evaluation.calibration import probabilities
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.results import EvaluationResult
from vitrail.formatting import comma_list, percent
from vitrail.models.vit import Model

logger = logging.getLogger(__name__)
Method = Literal["lac", "aps", "raps"]
METHODS: tuple[Method, ...] = ("lac", "aps", "raps")
RAPS_PENALTY = 0.1  # for each class that ranks above; fixed, not tuned
CONFIDENCE = 0.95  # of the statement about accepted predictions
GUIDE = 5  # one image in five chooses where to start, the others are used to test
CANDIDATES = 50  # thresholds that are tested
ALWAYS_ABSTAIN = 2.0  # a threshold above every probability
DRIFT_BINS = 10  # deciles of the confidence on the calibration images
DRIFT_Z = 3.09  # one false warning in 1,000
MIN_DRIFT_IMAGES = 50
MIN_DRIFT = 0.1  # total variation distance below which a difference does not matter


@dataclass(frozen=True, kw_only=True)
class Conformal:
    """Thresholds from calibration images; `model.metadata.conformal` holds its `to_dict()`."""

    method: Method
    error_rate: float
    samples: int  # calibration images
    thresholds: tuple[float, ...]  # of the scores, one or one for each class
    abstain: tuple[float, ...] = ()  # of the confidence, one or one for each class; () if none
    edges: tuple[float, ...] = ()  # of the bins of the drift check
    shares: tuple[float, ...] = ()  # of the calibration images in each bin
    digest: str = ""  # of the calibrated model
    data: str = ""

    def sets(self, probabilities: np.ndarray) -> np.ndarray:
        """Return which classes are in each prediction set: bool (N, K).

        The top class is always in it, so that no set is empty; this can only raise the coverage.
        """
        inside = class_scores(probabilities, self.method) <= np.array(self.thresholds)
        inside[np.arange(len(inside)), probabilities.argmax(axis=1)] = True
        return inside

    def accepts(self, probabilities: np.ndarray) -> np.ndarray:
        """Return whether the top class is probable enough not to abstain: bool (N,)."""
        thresholds = np.broadcast_to(self.abstain or 0.0, probabilities.shape[1])
        return probabilities.max(axis=1) >= thresholds[probabilities.argmax(axis=1)]

    def drift(self, confidence: Sequence[float] | np.ndarray) -> str:
        """Return a warning if the distribution of confidences (N,) differs from the calibration
        images.

        Two-sample chi-squared test at the 0.1 % level, and a minimum total variation distance.
        """
        shares = np.array(self.shares)
        if len(confidence) < MIN_DRIFT_IMAGES or len(shares) < 2:
            return ""
        counts = np.bincount(np.searchsorted(self.edges, confidence), minlength=len(shares))
        observed = counts / len(confidence)
        distance = np.abs(observed - shares).sum() / 2
        variance = shares * (1 / len(confidence) + 1 / self.samples)
        statistic = ((observed - shares) ** 2 / variance).sum()
        spread = 2 / (9 * (len(shares) - 1))  # Wilson and Hilferty's approximation
        limit = (len(shares) - 1) * (1 - spread + DRIFT_Z * math.sqrt(spread)) ** 3
        if statistic <= limit or distance < MIN_DRIFT:
            return ""
        return (
            f"the confidences of {len(confidence):,} images differ from those of the calibration "
            f"images (total variation distance {distance:.2f}); the error rate of "
            f"{percent(self.error_rate)} is not guaranteed for such images; calibrate again"
        )

    def to_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], classes: int) -> "Conformal":
        """Undo `to_dict` for a model with this many classes; other keys are ignored."""
        try:
            known: dict[str, Any] = {"digest": values.get("digest", "")}  # old files have none
            known |= {f.name: values[f.name] for f in fields(cls) if f.name not in known}
            numbers = ("thresholds", "abstain", "edges", "shares")
            known |= {name: tuple(map(float, known[name])) for name in numbers}
            conformal = cls(**known)
            lengths = len(conformal.thresholds), len(conformal.abstain)
            valid = (
                conformal.method in METHODS
                and lengths[0] in (1, classes)
                and lengths[1] in (0, 1, classes)
                and len(conformal.shares) == len(conformal.edges) + 1
                and isinstance(conformal.error_rate, float)
                and isinstance(conformal.samples, int)
                and conformal.samples > 0
            )
        except (KeyError, TypeError, ValueError):
            valid, conformal = False, None
        if not valid or conformal is None:
            raise CheckpointError("invalid conformal thresholds in the metadata; calibrate again")
        return conformal


def calibrate(
    model: Model | Reference,
    data: Any,
    split: str | None = None,
    *,
    error_rate: float = 0.05,
    method: Method = "lac",
    per_class: bool = False,
    **options: Any,
) -> tuple[Model, Conformal, EvaluationResult]:
    """Return the model with thresholds in its metadata, the thresholds, and the evaluation.

    >>> model, conformal, result = calibrate("runs/first", "photos", error_rate=0.05)
    >>> vitrail.save(model, "runs/calibrated")

    `per_class` guarantees the error rate for each class instead of on average. `options` are those
    of `evaluate`; the predictions it returns are in the model's order of classes. `DataError`
    if there are too few images for the error rate.
    """
    if not 0 < error_rate < 1:
        raise ConfigError(f"error_rate={error_rate} must be between 0 and 1, such as 0.05")
    if options.get("flip") or options.get("crops", 1) > 1 or options.get("restrict"):
        raise ConfigError(
            "thresholds are for the probabilities of predict; leave out flip, crops and restrict"
        )
    model = load(model) if isinstance(model, str | PathLike) else model
    result = evaluate(model, data, split, **options)
    predictions = result.predictions
    assert predictions is not None
    if predictions.multi_label or predictions.loss == "sigmoid":
        raise DataError(
            "prediction sets need a softmax and one label per image; these images or the model "
            "have several labels, or loss is sigmoid"
        )
    for note in result.notes:
        if note.startswith("the model was trained on"):
            raise DataError(f"{note}; calibrate with held-out images, which the guarantee needs")
    names = get_metadata(model).class_names
    if names and not options.get("by_order") and names != predictions.classes:
        columns = [predictions.classes.index(name) for name in names]
        predictions = replace(
            predictions,
            classes=names,
            logits=predictions.logits[:, columns],
            labels=np.argsort(columns)[predictions.labels],
        )
        result = replace(result, predictions=predictions)
    classes, labels = predictions.classes, predictions.labels
    p = probabilities(predictions.logits, "softmax")
    confidence, predicted = p.max(axis=1), p.argmax(axis=1)
    correct = predicted == labels
    edges = np.unique(np.quantile(confidence, np.linspace(0, 1, DRIFT_BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, confidence)
    scores = np.take_along_axis(class_scores(p, method), labels[:, None], axis=1)[:, 0]
    by_label: list[Any] = [...]
    by_predicted: list[Any] = [...]
    if per_class:
        needed, counts = images_needed(error_rate), np.bincount(labels, minlength=len(classes))
        if few := [name for name, n in zip(classes, counts.tolist(), strict=True) if n < needed]:
            raise DataError(
                f"an error rate of {100 * error_rate:g} % for each class needs at least {needed:,} "
                f"calibration images of each; {comma_list(few, quoted=True)} have fewer; add "
                "images, or leave per-class out"
            )
        by_label = [labels == k for k in range(len(classes))]
        by_predicted = [predicted == k for k in range(len(classes))]
    abstain = [
        abstention_threshold(confidence[rows], correct[rows], error_rate) for rows in by_predicted
    ]
    conformal = Conformal(
        method=method,
        error_rate=error_rate,
        samples=len(labels),
        thresholds=tuple(conformal_quantile(scores[rows], error_rate) for rows in by_label),
        abstain=tuple(ALWAYS_ABSTAIN if t is None else t for t in abstain)
        if any(t is not None for t in abstain)
        else (),
        edges=tuple(edges.tolist()),
        shares=tuple((np.bincount(bins, minlength=len(edges) + 1) / len(labels)).tolist()),
        digest=model_digest(model),
        data=str(data) if isinstance(data, str | PathLike) else "",
    )
    model.metadata = replace(get_metadata(model), conformal=conformal.to_dict())
    return model, conformal, result


def load_conformal(
    metadata: Metadata, classes: int, model: Model | None, *, int8: bool = False, warn: bool = True
) -> Conformal | None:
    """Return the thresholds in a model's metadata; None, and `warn`, if they do not apply.

    Without `model`, such as for an exported file, they are not compared with it.
    """
    if not metadata.conformal:
        return None
    reason = ""
    if int8:
        reason = "int8 changes the probabilities; use another engine or precision"
    elif model is not None and model_digest(model) != metadata.conformal.get("digest"):
        reason = (
            "the weights, configuration, token merging or preprocessing differ from those that "
            "were calibrated; run `vitrail calibrate` again"
        )
    if not reason:
        return Conformal.from_dict(metadata.conformal, classes)
    if warn:
        logger.warning(
            "warning: the thresholds of prediction sets and abstention are ignored: %s", reason
        )
    return None


def model_digest(model: Model) -> str:
    """Return a digest of everything that determines the probabilities."""
    model = unwrap_model(model)
    heads = {n: x for n, x in model.state_dict().items() if n.split(".")[0] in HEADS}
    preprocessing = get_metadata(model).preprocessing.to_dict()
    return backbone_digest(model, head=digest(heads, {}), preprocessing=preprocessing)


def class_scores(probabilities: np.ndarray, method: Method) -> np.ndarray:
    """Return the nonconformity score of each class. (N, K)"""
    if method == "lac":
        return 1 - probabilities
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ordered = np.take_along_axis(probabilities, order, axis=1).cumsum(axis=1)
    if method == "raps":
        ordered += RAPS_PENALTY * np.arange(probabilities.shape[1])
    scores = np.empty_like(ordered)
    np.put_along_axis(scores, order, ordered, axis=1)
    return scores


def conformal_quantile(scores: np.ndarray, error_rate: float) -> float:
    """Return the ceil((n + 1)(1 - error rate))-th smallest score; `DataError` if n is too small."""
    rank = math.ceil(round((len(scores) + 1) * (1 - error_rate), 9))
    if rank > len(scores):
        raise DataError(
            f"an error rate of {100 * error_rate:g} % needs at least {images_needed(error_rate):,} "
            f"calibration images, got {len(scores):,}; add images, or allow a higher error rate"
        )
    return float(np.partition(scores, rank - 1)[rank - 1])


def images_needed(error_rate: float) -> int:
    """Return the least number of calibration images for a prediction set."""
    return math.ceil(round(1 / error_rate, 9)) - 1


def correct_needed(error_rate: float) -> int:
    """Return the least number of correct predictions, without an error, for abstention."""
    return math.ceil(round(math.log(1 - CONFIDENCE) / math.log1p(-error_rate), 9))


def coverage_range(samples: int, error_rate: float) -> tuple[float, float]:
    """Return the 5th and 95th percentile of the coverage over draws of calibration images.

    It is distributed as Beta(k, n + 1 - k), k = ceil((n + 1)(1 - error rate)) (Vovk 2012), which is
    below x with the probability that a binomial of n and x is at least k.
    """
    k = math.ceil(round((samples + 1) * (1 - error_rate), 9))
    low, high = (
        bisect(lambda x, p=p: 1 - binomial_cdf(k - 1, samples, x) < p) for p in (0.05, 0.95)
    )
    return low, high


def abstention_threshold(
    confidence: np.ndarray, correct: np.ndarray, error_rate: float
) -> float | None:
    """Return a confidence above which at most `error_rate` of the predictions are wrong.

    This holds with probability `CONFIDENCE` over draws of the calibration images. One image in five
    is used to propose thresholds and where to start. On the others, thresholds are tested in
    descending order, as long as the test rejects an error rate above the limit. The last one that
    passes is returned; None if the first one fails.
    """
    order = np.random.default_rng(0).permutation(len(confidence))
    guide, rest = order[::GUIDE], np.delete(order, slice(None, None, GUIDE))
    if not len(rest):
        return None
    candidates = np.quantile(confidence[guide], np.linspace(1, 0, CANDIDATES))
    candidates = np.unique(np.append(candidates, 0.0))[::-1]  # 0: never abstain

    def p_value(
        threshold: float, rows: np.ndarray, scale: float = 1.0, extra: float = 0.0
    ) -> float:
        accepted = rows[confidence[rows] >= threshold]
        errors = np.count_nonzero(~correct[accepted]) + extra
        return binomial_cdf(round(scale * errors), round(scale * len(accepted)), error_rate)

    expected = [p_value(t, guide, len(rest) / len(guide), 0.5) for t in candidates]
    best = None
    for threshold in candidates[int(np.argmin(expected)) :].tolist():
        if p_value(threshold, rest) > 1 - CONFIDENCE:
            break
        best = threshold
    return best


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Return the probability of at most k successes in n trials."""
    if k >= n or p <= 0:
        return 1.0
    if p >= 1 or k < 0:
        return 0.0
    logs = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])  # log factorials
    i = np.arange(k + 1)
    terms = logs[n] - logs[i] - logs[n - i] + i * math.log(p) + (n - i) * math.log1p(-p)
    return min(1.0, float(np.exp(terms).sum()))


def clopper_pearson(errors: int, samples: int) -> float:
    """Return the exact one-sided upper bound of an error rate."""
    return bisect(lambda x: binomial_cdf(errors, samples, x) > 1 - CONFIDENCE) if samples else 1.0


def bisect(below: Callable[[float], bool]) -> float:
    """Return where `below` changes from True to False between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2
