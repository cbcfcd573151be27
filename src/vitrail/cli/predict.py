"""`vitrail predict`: what a model says about pictures."""

import csv
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BufferedReader, StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from vitrail.cli.arguments import DataOptions, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.status import UNMET
from vitrail.cli.text import MANNER, WIDTH, aside, printable
from vitrail.errors import ConfigError, DataError
from vitrail.export.kinds import MOST_DROP, EngineKind
from vitrail.formatting import truncate

if TYPE_CHECKING:
    from vitrail.prediction.predictor import Predictor
    from vitrail.prediction.results import Prediction

BAR = 24  # letters of the longest bar
FEW = 3  # pictures up to which each has its bars
NAME, LABEL = 30, 16  # letters of a column
WORTH = 0.01  # probability from which a guess is worth a word in the table
MOST_ERRORS = 20  # that are named; the others are counted


@dataclass(frozen=True, kw_only=True)
class Predict(DataOptions):
    """Say what pictures show: files, folders, patterns, or a list on standard input."""

    model: ModelReference
    """A bundle, a file of weights, hf:owner/name, or an .onnx file of `vitrail export`."""
    pictures: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PICTURES")]
    """Files, folders, patterns in quotes; `-` takes a list of paths, or a picture, from standard
    input."""
    top: int = 5
    """How many classes to tell."""
    threshold: float | None = None
    """Abstain below this probability. Of a model whose classes may come together, those from here
    on apply; 0.5 unless you say otherwise."""
    csv: bool = False
    """A table for other programs."""
    json: bool = False
    """One JSON object on a line for each picture."""
    features: Path | None = None
    """Write the vector of each picture to this .npz, in place of answers."""
    preprocessing: Preset = None
    engine: EngineKind | None = None
    """What computes; auto measures for two seconds and takes the fastest. torch unless you say."""
    merge: int = 0
    """Tokens to merge in each layer of a Vision Transformer: faster, a little less accurate."""
    data: str | None = None
    """For int8: pictures with labels, to measure what it loses; else those of the training."""
    max_drop: float = MOST_DROP
    """For int8: the largest share of accuracy that it may lose."""
    batch_size: int = 16
    """Pictures at once."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""

    def run(self) -> int:
        from vitrail.prediction.engines import AccuracyGuard
        from vitrail.prediction.predictor import Predictor, find_images

        self.check()
        if isinstance(sys.stdout, TextIOWrapper):  # names of files may be any bytes
            sys.stdout.reconfigure(errors="surrogateescape")
        predictor = Predictor(
            self.model,
            engine=self.engine or "",
            merge=self.merge,
            preprocessing=self.preprocessing,
            guard=AccuracyGuard(data=self.data, max_drop=self.max_drop),
            device=self.device,
            log=aside,
        )
        pictures: Iterable[Any] = find_images(self.pictures, standard_input)
        printed = self.features is None and sys.stdout.isatty()  # there, the lines are progress
        tally = Tally(engine=predictor.engine.name, progress=None if printed else Progress())
        if "-" not in self.pictures:
            pictures = list(pictures)
            tally.total = len(pictures)
        with tally.progress or nullcontext():
            if self.features is not None:
                self.write_features(predictor, pictures, tally)
            else:
                answers = predictor.stream(
                    pictures, top=self.top, threshold=self.threshold, batch_size=self.batch_size
                )
                for line in self.written(tally.watch(answers), tally):
                    print(line)
        sys.stdout.flush()
        for line in tally.lines():
            print(line, file=sys.stderr if self.csv or self.json else sys.stdout)
        return UNMET if tally.errors else 0

    def check(self) -> None:
        if not self.pictures:
            raise ConfigError("predict what? Name pictures, folders, or - for a list")
        if sum((self.csv, self.json, self.features is not None)) > 1:
            raise ConfigError("--csv, --json and --features are three ways to answer; give one")
        if self.features is not None and self.features.suffix != ".npz":
            raise ConfigError(f"--features {self.features} must end in .npz")

    def written(self, answers: Iterator["Prediction"], tally: "Tally") -> Iterator[str]:
        """What is printed: for programs or for people."""
        if self.csv:
            return as_csv(answers, self.top)
        if self.json:
            return (as_json(answer) for answer in answers)
        return (
            as_bars(answers)
            if tally.total is not None and tally.total <= FEW
            else as_table(answers)
        )

    def write_features(
        self, predictor: "Predictor", pictures: Iterable[Any], tally: "Tally"
    ) -> None:
        """The vectors of all pictures that can be read, and what those are called."""
        import numpy as np

        from vitrail.data.storage import atomic_path

        assert self.features is not None
        names: list[str] = []
        rows = []
        for batch in predictor.run_batches(pictures, batch_size=self.batch_size, features=True):
            for name, error in zip(batch.names, batch.errors, strict=True):
                tally.count(name, error, sure=True)
                if not error:
                    names.append(name)
            if batch.outputs is not None:
                rows.append(batch.outputs.numpy())
        if tally.progress is not None:
            tally.progress.done()
        if not rows:
            return
        vectors = np.concatenate(rows)
        with atomic_path(self.features) as temporary, temporary.open("wb") as file:
            np.savez(file, features=vectors, names=np.array(names))
        print(f"{len(names):,} vectors of {vectors.shape[1]:,} numbers: {self.features}")


@dataclass
class Tally:
    """How many pictures there were, and what became of them."""

    engine: str
    total: int | None = None  # not known of a list that comes in
    pictures: int = 0
    errors: int = 0
    named: list[str] = field(default_factory=list)  # the first of them, and why
    unsure: int = 0
    begun: float = field(default_factory=time.monotonic)
    progress: Progress | None = None

    def watch(self, answers: Iterable["Prediction"]) -> Iterator["Prediction"]:
        for answer in answers:
            self.count(answer.name, answer.error, sure=bool(answer.labels))
            yield answer

    def count(self, name: str, error: str, *, sure: bool) -> None:
        self.pictures += 1
        if error:
            self.errors += 1
            if len(self.named) < MOST_ERRORS:
                self.named.append(f"{name}: {error}")
        elif not sure:
            self.unsure += 1
        if self.progress is not None:
            self.progress(self.pictures, self.total)

    def lines(self) -> Iterator[str]:
        """The end: what could not be read, how many there were, and how fast it went."""
        seconds = time.monotonic() - self.begun
        if self.errors:
            yield f"{self.errors:,} of {self.pictures:,} could not be read:"
            for told in self.named:
                yield printable(f"  {told}")  # not wrapped: a path in two parts cannot be copied
            if self.errors > len(self.named):
                yield f"  and {self.errors - len(self.named):,} more"
        if self.pictures > FEW and not MANNER.quiet:
            unsure = f", not sure of {self.unsure:,}" if self.unsure else ""
            pace = f"{self.pictures / max(seconds, 1e-9):,.0f} a second"
            yield f"{self.pictures:,} pictures{unsure}, {pace} with {self.engine}"


def standard_input() -> BufferedReader:
    """What comes in, as bytes."""
    if sys.stdin is None:
        raise DataError("nothing can come in: standard input is closed")
    return cast(BufferedReader, sys.stdin.buffer)


def as_csv(answers: Iterable["Prediction"], top: int) -> Iterator[str]:
    """A line for each picture; what it is decided to be, then the guesses."""
    columns = [f"{what}_{n}" for n in range(1, top + 1) for what in ("class", "probability")]
    yield csv_line(["picture", "answer", *columns, "error"])
    for answer in answers:
        guesses = [x for guess in answer.guesses for x in (guess.label, f"{guess.probability:.6g}")]
        guesses += [""] * (2 * top - len(guesses))
        yield csv_line([answer.name, ";".join(answer.labels), *guesses, answer.error])


def csv_line(values: Iterable[str]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def as_json(answer: "Prediction") -> str:
    guesses = [{"label": label, "probability": chance} for label, chance in answer.guesses]
    told = {"picture": answer.name, "labels": list(answer.labels), "guesses": guesses}
    return json.dumps(told | {"error": answer.error or None})


def as_bars(answers: Iterable["Prediction"]) -> Iterator[str]:
    """A few pictures: every guess with its bar."""
    for answer in answers:
        if answer.error:
            continue  # it is named at the end
        unsure = "" if answer.labels else "   not sure"
        yield printable(f"{answer.name}{unsure}")
        width = min(NAME, max(len(guess.label) for guess in answer.guesses))
        for label, chance in answer.guesses:
            bar = "█" * round(BAR * chance) or "▏"
            yield f"  {truncate(label, width):{width}}  {100 * chance:5.1f} %  {bar}"


def as_table(answers: Iterable["Prediction"]) -> Iterator[str]:
    """Many pictures: one line each, with the answer and what else it might be."""
    yield f"{'picture':{NAME}}  {'answer':{LABEL}}          what else"
    for answer in answers:
        name = cut_left(printable(answer.name), NAME)
        if answer.error:
            yield f"{name:{NAME}}  (cannot be read)"
            continue
        label = truncate(", ".join(answer.labels) or "(not sure)", LABEL)
        line = f"{name:{NAME}}  {label:{LABEL}} {100 * answer.probability:5.1f} % "
        for other, chance in answer.guesses:
            more = f" {other} {100 * chance:.0f} %"
            if other not in answer.labels and chance >= WORTH and len(line) + len(more) <= WIDTH:
                line += more
        yield line.rstrip()


def cut_left(text: str, width: int) -> str:
    """The end of a path is what tells it from others."""
    return text if len(text) <= width else f"…{text[1 - width :]}"
