"""Figures 3 and 4: accuracy against the size of the pre-training set, ViT against BiT."""

from collections.abc import Mapping, Sequence

from vitrail.data.samples import Samples
from vitrail.data.sources import open_source
from vitrail.planning.cost import cost_of
from vitrail.reproduction.cells import Cell, Half, Result, halved
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Mark, Panel, chart
from vitrail.reproduction.means import Mean, by_seed, difference, fewshot, numbers
from vitrail.reproduction.means import accuracy as test_accuracy
from vitrail.reproduction.models import (
    BATCH,
    FINE_PICTURES,
    FINE_STEPS,
    STEPS,
    before_transfer,
    bit,
    on_target,
    pretraining,
    vit,
)
from vitrail.reproduction.published import MODELS5, TABLE5
from vitrail.reproduction.report import Picture, Report, Table, Verdict
from vitrail.training.settings import ModelSettings

SEEDS = 2
SHARES = (1 / 60, 2 / 15, 1.0)  # of the training pictures: 1,000, 8,000 and 60,000 of 60,000
LEAST = 40  # pictures
MODELS = {"ViT M": vit("M"), "ViT L": vit("L"), "BiT S": bit("S"), "BiT M": bit("M")}
RIVALS = (("ViT M", "BiT S"), ("ViT L", "BiT M"))  # of about the same work each
CARRIED, DRAWS = ("ViT M", "ViT L", "BiT S"), 3  # figure 3: models, and draws of target pictures
SIZES = {"ImageNet": 1.3e6, "ImageNet-21k": 14e6, "JFT": 303e6}  # pictures, as published


def cells4(sets: Sets) -> dict[Key, Cell]:
    whole = len(pictures_of(sets, ""))
    return {
        (name, count, seed): pretraining(sets, model, seed, pictures=some(count, whole))
        for seed in range(SEEDS)
        for name, model in MODELS.items()
        for count in sizes_of(whole)
    }


def some(count: int, whole: int) -> int | None:
    """All pictures are what other experiments learn from too, and that run is shared."""
    return None if count == whole else count


def pictures_of(sets: Sets, half: Half) -> Samples:
    return halved(open_source(sets.pretrain, "train"), half)


def sizes_of(whole: int) -> list[int]:
    return [max(LEAST, round(share * whole)) for share in SHARES]


def cells3(sets: Sets) -> dict[Key, Cell]:
    """Each pre-trained model is fine-tuned with several draws of the few target pictures."""
    sizes = sizes_of(len(pictures_of(sets, "" if sets.target else "even")))
    return {
        (name, pictures, DRAWS * seed + draw): on_target(
            sets,
            before_transfer(sets, MODELS[name], seed, pictures=pictures),
            ModelSettings(),
            DRAWS * seed + draw,
        )
        for seed in range(SEEDS)
        for draw in range(DRAWS)
        for name in CARRIED
        for pictures in sizes
    }


def report4(results: Mapping[Key, Result], sets: Sets) -> Report:
    means = by_seed(results, fewshot)
    gaps = {pair: apart(means, *pair) for pair in RIVALS}
    return Report(
        name="figure4",
        title=FIGURE4.title,
        claim=FIGURE4.claim,
        did=(
            f"Two ViTs and two BiT ResNets learned from {in_words(sizes(means))} pictures of "
            f"{sets.pretrain_name}, {STEPS} steps of {BATCH} each and one recipe for all, "
            f"{SEEDS} seeds. They are compared by a linear probe of five pictures of each class. "
            f"{work(results)}"
        ),
        found=(
            f"ViT minus BiT from the smallest set to the largest: {told(gaps)}. The claim is said "
            "to hold if BiT is ahead with the smallest set and ViT with the largest, for both "
            "pairs; in part if the difference moves in favor of ViT for both."
        ),
        verdict=crossing(list(gaps.values())),
        tables=[table(means, "5-shot accuracy in percent, by pictures pre-trained on")],
        pictures=[
            Picture(
                file="figure4.svg",
                caption="5-shot accuracy against the size of the pre-training set",
                content=chart([here(means, sets, "5-shot accuracy")]),
            )
        ],
        data={"fewshot": numbers(means), "test accuracy": numbers(by_seed(results, test_accuracy))},
    )


def report3(results: Mapping[Key, Result], sets: Sets) -> Report:
    means = by_seed(results, test_accuracy)
    gaps = {("ViT L", "ViT M"): apart(means, "ViT L", "ViT M")}
    against = {RIVALS[0]: apart(means, *RIVALS[0])}
    return Report(
        name="figure3",
        title=FIGURE3.title,
        claim=FIGURE3.claim,
        did=(
            f"The models of figure 4 learned from {in_words(sizes(means))} pictures of "
            f"{sets.source_name}, {STEPS} steps of {BATCH}. They were fine-tuned on "
            f"{FINE_PICTURES} pictures of {sets.target_name} for {FINE_STEPS} steps and judged by "
            f"its test pictures: {SEEDS} seeds of pre-training, {DRAWS} draws of the pictures each."
        ),
        found=(
            f"From the smallest pre-training set to the largest: {told(gaps)}; {told(against)}. "
            "The claim is said to hold if the larger ViT is behind with the smallest set and "
            "ahead with the largest; in part if the difference moves in its favor."
        ),
        verdict=crossing(list(gaps.values())),
        tables=[
            table(
                means,
                f"fine-tuned on {sets.target_name}, accuracy in percent, by pictures "
                "pre-trained on",
            ),
            published3(),
        ],
        pictures=[
            Picture(
                file="figure3.svg",
                caption="Accuracy after fine-tuning against the size of the pre-training set",
                content=chart([panel3(), here(means, sets, f"accuracy on {sets.target_name}")]),
            )
        ],
        data={"accuracy": numbers(means)},
    )


def sizes(means: Mapping[Key, Mean]) -> list[int]:
    return sorted({int(count) for _, count in means})


def apart(means: Mapping[Key, Mean], one: str, other: str) -> list[Mean]:
    """By how much one is ahead of the other, from the smallest set to the largest."""
    return [difference(means[one, n], means[other, n]) for n in sizes(means)]


def crossing(gaps: list[list[Mean]]) -> Verdict:
    """By the differences of each pair, from the smallest set to the largest."""
    if all(first.mean < 0 < last.mean for first, *_, last in gaps):
        return "holds"
    growing = all(last.mean > first.mean for first, *_, last in gaps)
    return "holds in part" if growing else "does not hold"


def told(gaps: Mapping[tuple[str, str], list[Mean]]) -> str:
    return "; ".join(
        f"{one} against {other} {', '.join(f'{100 * gap.mean:+.1f}' for gap in row)} points"
        for (one, other), row in gaps.items()
    )


def in_words(counts: Sequence[int]) -> str:
    *first, last = (f"{count:,}" for count in counts)
    return f"{', '.join(first)} and {last}"


def work(results: Mapping[Key, Result]) -> str:
    """What the models cost, so that equals are compared."""
    costs = {key[0]: cost_of(result.config).forward / 1e6 for key, result in results.items()}
    return (
        "Work of a picture: "
        + ", ".join(f"{n} {cost:.0f} MFLOP" for n, cost in costs.items())
        + "."
    )


def table(means: Mapping[Key, Mean], caption: str) -> Table:
    return Table(
        caption=caption,
        head=("model", *(f"{n:,}" for n in sizes(means))),
        rows=[
            (name, *(means[name, n].text for n in sizes(means)))
            for name in dict.fromkeys(str(key[0]) for key in means)
        ],
    )


def here(means: Mapping[Key, Mean], sets: Sets, label: str) -> Panel:
    return Panel(
        title=f"here ({sets.pretrain_name})",
        lines=[
            Line(name, [means[name, n].mark(n) for n in sizes(means)])
            for name in dict.fromkeys(str(key[0]) for key in means)
        ],
        x_label="pictures pre-trained on",
        y_label=label,
        log_x=True,
    )


def panel3() -> Panel:
    lines = [
        Line(
            model,
            [
                Mark(pictures, TABLE5[name]["ImageNet"][place] / 100)
                for name, pictures in SIZES.items()
                if place < len(TABLE5[name]["ImageNet"])
            ],
        )
        for place, model in enumerate(MODELS5)
    ]
    return Panel(
        title="published (fine-tuned on ImageNet)",
        lines=lines,
        x_label="pictures pre-trained on",
        y_label="accuracy on ImageNet",
        log_x=True,
    )


def published3() -> Table:
    return Table(
        caption="published: fine-tuned on ImageNet at 384 pixels, accuracy in percent",
        head=("model", *(f"{name} ({n / 1e6:g} M)" for name, n in SIZES.items())),
        rows=[
            (
                line.name,
                *["-"] * (len(SIZES) - len(line.marks)),
                *(f"{100 * mark.y:.2f}" for mark in line.marks),
            )
            for line in panel3().lines
        ],
    )


FIGURE3 = Experiment(
    name="figure3",
    title="Larger Transformers need larger sets to pre-train on",
    claim=(
        "Pre-trained on ImageNet alone, ViT-L is no better than ViT-B, and BiT ResNets beat both; "
        "with ImageNet-21k they are level, and only JFT-300M shows what the larger models can do "
        "(published, fine-tuned on ImageNet: B/16 77.9, 84.0, 84.2 %, L/16 76.5, 85.2, 87.1 %)."
    ),
    cells=cells3,
    report=report3,
)
FIGURE4 = Experiment(
    name="figure4",
    title="ResNets win with little data, Transformers with much",
    claim=(
        "On subsets of JFT of 9, 30, 90 and 300 million pictures, with the same settings for all, "
        "Transformers learn by heart sooner than ResNets of the same work: ViT-B/32 is much worse "
        "than ResNet50 on 9 million and better on 90 million and more. (Published as a picture "
        "only, so there are no numbers to stand beside ours.)"
    ),
    cells=cells4,
    report=report4,
)
