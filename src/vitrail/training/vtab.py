"""The protocol of VTAB-1k (Zhai et al. 2019, arXiv:1910.04867) over anybody's tasks.

Of each task 1,000 training pictures are drawn. Where there is something to choose, each candidate
learns from 800 of them and is judged by the other 200; the best then learns from all 1,000 and is
judged by all test pictures, once. The score is the mean over tasks.

Every trial is a line of results.jsonl as soon as it is done, with all that it depends on, and is
not repeated: so whatever was stopped goes on, and a task that is added costs only itself.
"""

import shutil
from collections.abc import Sequence

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.load import load
from vitrail.data.sources import fingerprint
from vitrail.errors import ConfigError
from vitrail.formatting import percent
from vitrail.probing.features import backbone
from vitrail.training.material import present
from vitrail.training.scores import Ledger, Report, Score, TaskScores
from vitrail.training.survival import sole_writer
from vitrail.training.tasks import Hand, OpenTask, deal
from vitrail.training.transfer import HEADLESS, METHODS, Bench, Method, Protocol, Stage, parts

__all__ = ["Bench", "Protocol", "measure"]


def measure(bench: Bench, tasks: Sequence[OpenTask], seeds: int = 1) -> Report:
    """How good a model is at each task, and on the whole; the mean over `seeds` draws."""
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} draws nothing to learn from; give 1 or more")
    with sole_writer(bench.out):
        method, digest = prepare(bench)
        ledger = Ledger(bench.out / "results.jsonl")
        done = []
        try:
            for place, task in enumerate(tasks, 1):
                bench.tell(f"{task.name}, task {place} of {len(tasks)}")
                for note in dict.fromkeys((*task.train.notes, *task.test.notes)):
                    bench.tell(f"  note: {note}")
                scores = [score(bench, method, digest, ledger, task, s) for s in range(seeds)]
                classes = len(task.train.classes)
                done.append(TaskScores(task=task.task, classes=classes, scores=scores))
        finally:
            shutil.rmtree(bench.out / HEADLESS, ignore_errors=True)
        report = Report(
            model=bench.reference,
            protocol=bench.protocol.to_dict(),
            setting=method.setting,
            tasks=done,
        )
        write_json(bench.out / "results.json", report.to_dict())
    return report


def prepare(bench: Bench) -> tuple[Method, str]:
    """The method, ready to begin, and a digest of the model's weights."""
    probing = bench.protocol.method != "finetune"  # else each run loads the model for itself
    size = bench.protocol.image_size if probing else None
    tell = bench.tell if probing else (lambda line: None)
    model = load(bench.reference, image_size=size, log=tell)
    if probing:
        model = model.to(distributed.init(bench.machine.device))
    return METHODS[bench.protocol.method](bench, model), backbone(model)


def score(
    bench: Bench, method: Method, digest: str, ledger: Ledger, task: OpenTask, seed: int
) -> Score:
    """One task with one draw: choose if there is a choice, then judge."""
    hand = deal(task.train, bench.protocol.examples, seed)
    for note in notes(task, hand, bench.protocol.examples):
        bench.tell(f"  note: {note}")
    trial = method.begin(task, hand, seed)
    known = {name: fingerprint(part) for name, part in parts(task, hand).items()}
    old = len(ledger.new)

    def tried(setting: float, stage: Stage) -> tuple[float, int]:
        learned, judged = ("fit", "dev") if stage == "choice" else ("train", "test")
        about = {
            "task": task.name,
            "seed": seed,
            "stage": stage,
            method.setting: setting,
            "learned": known[learned],
            "judged": known[judged],
            "weights": digest,
            "vary": task.task.vary,
            **bench.protocol.to_dict(),
        }
        if (row := ledger.find(about)) is None:
            folder = bench.out / "runs" / task.name / f"{stage}-{setting:g}-{Ledger.short(about)}"
            accuracy, pictures = trial(setting, stage, folder)
            found = {"model": bench.reference, "accuracy": accuracy, "pictures": pictures}
            row = ledger.add(about, found)
            if stage == "choice":
                shutil.rmtree(folder, ignore_errors=True)  # a model nobody will ask for
        return row["accuracy"], row["pictures"]

    candidates = method.candidates
    choices = {value: tried(value, "choice")[0] for value in candidates if len(candidates) > 1}
    chosen = max(choices, key=lambda value: choices[value]) if choices else candidates[0]
    accuracy, pictures = tried(chosen, "test")
    again = ", done before" if len(ledger.new) == old else ""
    right = f"{percent(accuracy)} of {pictures:,}"
    bench.tell(f"  {right}, {method.setting} {chosen:g}, seed {seed}{again}")
    if pictures < len(task.test):
        bench.tell(f"  note: {len(task.test) - pictures:,} test pictures could not be read")
    return Score(
        seed=seed,
        setting=chosen,
        accuracy=accuracy,
        learned=len(hand.train),
        judged=pictures,
        choices=choices,
    )


def notes(task: OpenTask, hand: Hand, examples: int) -> list[str]:
    """What should be known about a draw."""
    found = []
    if len(hand.train) < examples:
        found.append(f"{len(hand.train):,} training pictures are all there are, of {examples:,}")
    unseen = present(task.test) & ~present(hand.train)
    if unseen.any():
        found.append(f"{unseen.sum():,} classes of the test pictures are not among those drawn")
    return found
