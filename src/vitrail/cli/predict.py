"""`vitrail predict`: classify images. `vitrail serve`: the same over HTTP, with a web page."""

import csv
import glob
import json
import os
import sys
import time
from array import array
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from vitrail.cli.console import (
    VERBOSITY,
    WIDTH,
    Progress,
    log,
    log_stderr,
    paragraph,
    printable,
)
from vitrail.cli.options import (
    UNMET,
    BatchSize,
    EngineOptions,
    Int8Data,
    MaxDrop,
    RunnableModel,
    default_model,
)
from vitrail.errors import ConfigError, DataError, similar_path
from vitrail.export import MAX_DROP
from vitrail.formatting import truncate
from vitrail.serving.config import ServerConfig, parse_models

if TYPE_CHECKING:
    from vitrail.prediction.predictor import Prediction, Predictor

MAX_BAR_IMAGES = 3  # images up to which each prediction is shown as bars
BAR_WIDTH = 24
NAME_WIDTH, LABEL_WIDTH = 30, 16
MIN_PROBABILITY = 0.01  # of other classes in the table
TOKEN = "VITRAIL_TOKEN"
MAX_ERRORS = 20  # that are named; the others are counted


@dataclass(frozen=True, kw_only=True)
class Predict(EngineOptions):
    """Classify images: files, folders, glob patterns, or a list on standard input."""

    model: RunnableModel
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGES")]
    """Files, folders, quoted glob patterns; - reads a list of paths, or one image, from standard
    input."""
    top: int = 5
    """Number of classes per image."""
    threshold: float | None = None
    """Abstain below this probability (default: that of vitrail calibrate). For a multi-label model:
    minimum probability of a predicted class (default: 0.5)."""
    csv: bool = False
    """Print CSV; to write a file, redirect it: > predictions.csv"""
    json: bool = False
    """Print JSON Lines: one object per image."""
    features: Path | None = None
    """Write the feature vectors to this .npz file instead of predicting classes."""
    data: Int8Data = None
    max_drop: MaxDrop = MAX_DROP
    batch_size: BatchSize = 16

    def run(self) -> int:
        from vitrail.checkpoints.load import check_reference
        from vitrail.prediction.predictor import find_images

        if not self.paths:
            raise ConfigError("no images given; pass files, folders, or - for a list")
        if sum((self.csv, self.json, self.features is not None)) > 1:
            raise ConfigError("--csv, --json and --features exclude each other; pass one of them")
        if self.features is not None and self.features.suffix != ".npz":
            raise ConfigError(f"--features {self.features} must end in .npz")
        check_reference(self.model)  # before the paths, and these before a model is downloaded
        for path in map(os.path.expanduser, self.paths):
            if path != "-" and not (os.path.exists(path) or glob.has_magic(path)):
                raise DataError(f"file not found: {path}{similar_path(path)}")
        predictor = self.open_predictor(
            self.model, data=self.data, max_drop=self.max_drop, log=log_stderr
        )
        skipped = Counts[str]()  # files of folders, by extension
        images: Iterable[Any] = find_images(self.paths, standard_input, skipped)
        total = None  # unknown for standard input
        if "-" not in self.paths:
            images = list(images)
            total = len(images)
        # On a terminal, the printed predictions show the progress.
        printed = self.features is None and sys.stdout.isatty()
        counter = Counter(total, None if printed else Progress())
        with counter.progress or nullcontext():
            if self.features is not None:
                self.write_features(predictor, images, counter, self.features)
            else:
                predictions = counter.count_all(
                    predictor.stream(
                        images, top=self.top, threshold=self.threshold, batch_size=self.batch_size
                    )
                )
                sets = predictor.conformal is not None
                if self.csv:
                    rows = csv_rows(predictions, self.top, sets=sets)
                    csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
                    lines = ()
                elif self.json:
                    lines = map(json_line, predictions)
                elif total is not None and total <= MAX_BAR_IMAGES:
                    lines = bar_lines(predictions)
                else:
                    lines = table_lines(predictions, sets=sets)
                for line in lines:
                    print(line)
        sys.stdout.flush()
        for line in counter.summary(predictor.engine.name):
            print(line, file=sys.stderr if self.csv or self.json else sys.stdout)
        if skipped:
            counts = ", ".join(f"{count:,} {name}" for name, count in skipped.most_common(5))
            text = f"{skipped.total():,} file{'s' * (skipped.total() != 1)} skipped ({counts})"
            log_stderr(f"note: {text}: not images that vitrail reads")
        if predictor.conformal and (drift := predictor.conformal.drift(counter.confidences)):
            print(f"warning: {drift}", file=sys.stderr)
        return UNMET if counter.errors else 0

    def write_features(
        self, predictor: "Predictor", images: Iterable[Any], counter: "Counter", path: Path
    ) -> None:
        """Write the features and names of all readable images."""
        import numpy as np

        from vitrail.data.storage import atomic_path

        names: list[str] = []
        rows = []
        for batch in predictor.run_batches(images, batch_size=self.batch_size, features=True):
            for name, error in zip(batch.names, batch.errors, strict=True):
                counter.count(name, error)
                if not error:
                    names.append(name)
            if batch.outputs is not None:
                rows.append(batch.outputs.numpy())
        if counter.progress is not None:
            counter.progress.done()
        if not rows:
            return
        vectors = np.concatenate(rows)
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez(file, features=vectors, names=np.array(names))
        print(f"done: {path} ({len(names):,} vectors, {vectors.shape[1]:,} features)")


class Counter:
    """Counts images, unreadable images and abstentions."""

    def __init__(self, total: int | None, progress: Progress | None) -> None:
        self.total, self.progress = total, progress
        self.images = self.errors = self.abstained = 0
        self.messages: list[str] = []  # of the first errors
        self.confidences = array("d")  # of the top classes, for the drift check
        self.begun = time.monotonic()

    def count_all(self, predictions: Iterable["Prediction"]) -> Iterator["Prediction"]:
        for prediction in predictions:
            self.count(prediction.name, prediction.error, abstained=not prediction.labels)
            if not prediction.error:
                self.confidences.append(prediction.probability)
            yield prediction

    def count(self, name: str, error: str, *, abstained: bool = False) -> None:
        self.images += 1
        if error:
            self.errors += 1
            if len(self.messages) < MAX_ERRORS:
                self.messages.append(f"{name}: {error}")
        elif abstained:
            self.abstained += 1
        if self.progress is not None:
            self.progress(self.images, self.total)

    def summary(self, engine: str) -> Iterator[str]:
        seconds = time.monotonic() - self.begun
        if self.errors:
            noun, verb = "image" + "s" * (self.images != 1), "is" if self.errors == 1 else "are"
            yield f"{self.errors:,} of {self.images:,} {noun} {verb} unreadable:"
            for message in self.messages:
                yield printable(f"  {message}")  # not wrapped, so that paths can be copied
            if self.errors > len(self.messages):
                yield f"  and {self.errors - len(self.messages):,} more"
        if self.images > MAX_BAR_IMAGES and not VERBOSITY.quiet:
            abstained = f", {self.abstained:,} abstentions" if self.abstained else ""
            speed = f"{self.images / max(seconds, 1e-9):,.0f} images/s"
            yield f"{self.images:,} images{abstained}, {speed} ({engine})"


def standard_input() -> BufferedReader:
    if sys.stdin is None:
        raise DataError("standard input is closed; pass files or folders instead of -")
    return cast(BufferedReader, sys.stdin.buffer)


def csv_rows(predictions: Iterable["Prediction"], top: int, *, sets: bool) -> Iterator[list[str]]:
    columns = [f"{what}_{n}" for n in range(1, top + 1) for what in ("class", "probability")]
    yield ["picture", "answer", *["prediction_set"] * sets, *columns, "error"]
    for one in predictions:
        guesses = [x for guess in one.guesses for x in (guess.label, f"{guess.probability:.6g}")]
        guesses += [""] * (2 * top - len(guesses))
        members = [";".join(one.prediction_set)] * sets
        yield [one.name, ";".join(one.labels), *members, *guesses, one.error]


def json_line(prediction: "Prediction") -> str:
    guesses = [{"label": label, "probability": p} for label, p in prediction.guesses]
    values: dict[str, Any] = {"picture": prediction.name, "label": prediction.label or None}
    values |= {"labels": list(prediction.labels), "guesses": guesses}
    if prediction.prediction_set:
        values["prediction_set"] = list(prediction.prediction_set)
    return json.dumps(values | {"error": prediction.error or None})


def bar_lines(predictions: Iterable["Prediction"]) -> Iterator[str]:
    """Each class of a few images, with a bar; unreadable images are in the summary."""
    for one in predictions:
        if one.error:
            continue
        yield printable(f"{one.name}{'' if one.labels else '   (abstained)'}")
        if one.prediction_set:
            members = ", ".join(one.prediction_set)
            yield from paragraph(printable(f"  prediction set: {members}"), 4)
        width = min(NAME_WIDTH, max(len(guess.label) for guess in one.guesses))
        for label, p in one.guesses:
            bar = "█" * round(BAR_WIDTH * p) or "▏"
            yield printable(f"  {truncate(label, width):{width}}  {100 * p:5.1f} %  {bar}")


def table_lines(predictions: Iterable["Prediction"], *, sets: bool) -> Iterator[str]:
    """One line per image, as it arrives; the last column has other classes or prediction sets."""
    last = "prediction set" if sets else "other classes"
    yield f"{'image':{NAME_WIDTH}}  {'prediction':{LABEL_WIDTH}}          {last}"
    for one in predictions:
        name = printable(one.name)
        if len(name) > NAME_WIDTH:  # the end of a path is what distinguishes it
            name = f"…{name[1 - NAME_WIDTH :]}"
        if one.error:
            yield f"{name:{NAME_WIDTH}}  (unreadable)"
            continue
        label = truncate(", ".join(one.labels) or "(abstained)", LABEL_WIDTH)
        line = f"{name:{NAME_WIDTH}}  {label:{LABEL_WIDTH}} {100 * one.probability:5.1f} % "
        width = WIDTH - len(line) - 1
        if one.prediction_set:  # in full
            rest = wrap(", ".join(one.prediction_set), width, break_on_hyphens=False)
        else:
            others = [
                f"{other} {100 * p:.0f} %"
                for other, p in one.guesses
                if other not in one.labels and p >= MIN_PROBABILITY
            ]
            rest = [truncate(", ".join(others), width)]
        yield printable(f"{line} {rest[0]}".rstrip())
        yield from (printable(f"{'':{len(line)}} {more}") for more in rest[1:])


@dataclass(frozen=True, kw_only=True)
class Serve(ServerConfig, EngineOptions):
    """Serve models over HTTP; open the address in a browser to try them."""

    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL|NAME=MODEL")
    ] = ()
    """Bundles, weights files, hf:owner/name, or .onnx files; the first is the default model.
    Without any, builtin:vit-photos is served, and you teach it classes in the web page."""
    data: Int8Data = None
    max_drop: MaxDrop = MAX_DROP

    def run(self) -> None:
        if self.merge and (self.allow_teach or not self.models):
            raise ConfigError(
                "--merge changes the features that classes are taught from; omit --merge, or serve "
                "a model without --allow-teach"
            )
        token = os.environ.get(TOKEN) if self.token is None else self.token
        if token == "":
            raise ConfigError(f"the token is empty; set {TOKEN} or --token, or unset both")
        config = replace(self, token=token, log="off" if VERBOSITY.quiet else self.log)
        if not config.models:
            if not (config.allow_teach or config.is_loopback or token):
                raise ConfigError(
                    f"without a model, every machine that reaches {self.host} could teach classes; "
                    "set a --token, pass --allow-teach, or name a model"
                )
            config = replace(
                config, models=(default_model("vitrail serve {}", log=log),), allow_teach=True
            )
        elif config.teach_to is not None and not config.allow_teach:
            raise ConfigError("--teach-to saves taught models; it needs --allow-teach")
        references = parse_models(config.models)
        from vitrail.serving.server import serve

        load = partial(self.open_predictor, data=self.data, max_drop=self.max_drop, log=log)
        serve(references, config, predictor=load, log=partial(print, flush=True))
