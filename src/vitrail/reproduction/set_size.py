"""Figures 3 and 4: accuracy against the size of the pre-training set, ViT against BiT."""

from collections.abc import Iterator, Mapping, Sequence

from vitrail.data.samples import Samples
from vitrail.data.sources import open_source
from vitrail.planning.cost import cost_of
from vitrail.reproduction.cells import PROBE, Cell, Half, Result, halved
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Mark, Panel, chart
from vitrail.reproduction.means import (
    Mean,
    accuracy,
    average,
    by_seed,
    fewshot,
    judged,
    numbers,
    over_seeds,
)
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
from vitrail.reproduction.report import Picture, Report, Table
from vitrail.training.config import ModelSettings

SEEDS = 2
SHARES = (1 / 60, 2 / 15, 1.0)  # of the training pictures: 1,000, 8,000 and 60,000 of 60,000
LEAST = 40  # pictures
SMALL = {"ViT M": vit("M"), "BiT S": bit("S")}
LARGE = {"ViT L": vit("L"), "BiT M": bit("M")}  # these learn from the smallest and the largest set
RIVALS = (("ViT M", "BiT S"), ("ViT L", "BiT M"))  # of about the same work each
CARRIED, DRAWS = ("ViT M", "ViT L"), 2  # figure 3: models, and draws of target pictures
SIZES = {"ImageNet": 1.3e6, "ImageNet-21k": 14e6, "JFT": 303e6}  # pictures, as published


def learners(whole: int) -> Iterator[tuple[str, ModelSettings, int]]:
    """Which model learns from how many pictures."""
    counts = [max(LEAST, round(share * whole)) for share in SHARES]
    for name, model in SMALL.items():
        yield from ((name, model, count) for count in counts)
    for name, model in LARGE.items():
        yield from ((name, model, count) for count in (counts[0], counts[-1]))


def cells4(sets: Sets) -> dict[Key, Cell]:
    whole = len(pictures_of(sets, ""))
    return {
        (name, count, seed): pretraining(sets, model, seed, pictures=some(count, whole))
        for seed in range(SEEDS)
        for name, model, count in learners(whole)
    }


def cells3(sets: Sets) -> dict[Key, Cell]:
    """Each pre-trained model is fine-tuned with several draws of the few target pictures."""
    whole = len(pictures_of(sets, "" if sets.target else "even"))
    return {
        (name, count, draw, seed): on_target(
            sets,
            before_transfer(sets, model, seed, pictures=some(count, whole)),
            ModelSettings(),
            DRAWS * seed + draw,
        )
        for seed in range(SEEDS)
        for draw in range(DRAWS)
        for name, model, count in learners(whole)
        if name in CARRIED
    }


def pictures_of(sets: Sets, half: Half) -> Samples:
    return halved(open_source(sets.pretrain, "train"), half)


def some(count: int, whole: int) -> int | None:
    """All pictures are what other experiments learn from too, and that run is shared."""
    return None if count == whole else count


def report4(results: Mapping[Key, Result], sets: Sets) -> Report:
    means = by_seed(results, fewshot)
    gaps = {pair: ends(means, *pair) for pair in RIVALS}
    return FIGURE4.reported(
        did=(
            f"Two ViTs and two BiT ResNets learned from {in_words(counts_of(means))} pictures of "
            f"{sets.pretrain_name} (the larger two from the fewest and the most), {STEPS} steps of "
            f"{BATCH} each and one recipe for all, {SEEDS} seeds. They are compared by {PROBE}. "
            f"{work(results)}"
        ),
        found=(
            f"With the smallest set and with the largest, {told(gaps)}. The parts of the claim, "
            "for the mean of both pairs: BiT is ahead with the smallest set; ViT is ahead with the "
            "largest; the difference moves in favor of ViT."
        ),
        verdict=judged(crossing(*map(average, zip(*gaps.values(), strict=True)))),
        tables=[table(means, "5-shot accuracy in percent, by pictures pre-trained on")],
        pictures=[
            Picture(
                file="figure4.svg",
                caption="5-shot accuracy against the size of the pre-training set",
                content=chart([here(means, sets, "5-shot accuracy")]),
            )
        ],
        data={"fewshot": numbers(means), "test accuracy": numbers(by_seed(results, accuracy))},
    )


def report3(results: Mapping[Key, Result], sets: Sets) -> Report:
    means = over_seeds(without_draws(results))
    gaps = {("ViT L", "ViT M"): ends(means, "ViT L", "ViT M")}
    return FIGURE3.reported(
        did=(
            f"Two ViTs learned from {in_words(counts_of(means))} pictures of "
            f"{sets.source_name} (the larger ViT from the fewest and the most), {STEPS} steps of "
            f"{BATCH}. They were fine-tuned on {FINE_PICTURES} pictures of {sets.target_name} for "
            f"{FINE_STEPS} steps and judged by its test pictures: {SEEDS} seeds, and the mean of "
            f"{DRAWS} draws of these pictures for each."
        ),
        found=(
            f"With the smallest pre-training set and with the largest, {told(gaps)}. The parts of "
            "the claim: the larger ViT is behind with the smallest set; it is ahead with the "
            "largest; the difference moves in its favor."
        ),
        verdict=judged(crossing(*gaps["ViT L", "ViT M"])),
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


def without_draws(results: Mapping[Key, Result]) -> dict[Key, float]:
    """The mean over draws: two fine-tunings of one model are not two models."""
    found: dict[Key, list[float]] = {}
    for (name, count, _, seed), result in results.items():
        found.setdefault((name, count, seed), []).append(accuracy(result))
    return {key: sum(values) / len(values) for key, values in found.items()}


def ends(means: Mapping[Key, Mean], one: str, other: str) -> tuple[Mean, Mean]:
    """By how much one is ahead of the other, with the smallest set and with the largest."""
    counts = counts_of(means)
    first, last = (means[one, count] - means[other, count] for count in (counts[0], counts[-1]))
    return first, last


def crossing(first: Mean, last: Mean) -> list[Mean]:
    """What is above zero if the order turns round from the smallest set to the largest."""
    return [-first, last, last - first]


def told(gaps: Mapping[tuple[str, str], tuple[Mean, Mean]]) -> str:
    return "; ".join(
        f"{one} minus {other} is {first.signed} and {last.signed} points"
        for (one, other), (first, last) in gaps.items()
    )


def counts_of(means: Mapping[Key, Mean]) -> list[int]:
    return sorted({int(count) for _, count in means})


def in_words(counts: Sequence[int]) -> str:
    *first, last = (f"{count:,}" for count in counts)
    return f"{', '.join(first)} and {last}"


def work(results: Mapping[Key, Result]) -> str:
    """What the models cost, so that equals are compared."""
    costs = {key[0]: cost_of(result.config).forward / 1e6 for key, result in results.items()}
    listed = ", ".join(f"{name} {cost:.0f} MFLOP" for name, cost in costs.items())
    return f"Work of a picture: {listed}."


def table(means: Mapping[Key, Mean], caption: str) -> Table:
    counts = counts_of(means)
    return Table(
        caption=caption,
        head=("model", *(f"{count:,}" for count in counts)),
        rows=[
            (name, *(means[name, n].text if (name, n) in means else "" for n in counts))
            for name in names_of(means)
        ],
    )


def names_of(means: Mapping[Key, Mean]) -> list[str]:
    return list(dict.fromkeys(str(key[0]) for key in means))


def here(means: Mapping[Key, Mean], sets: Sets, label: str) -> Panel:
    return Panel(
        title=f"here ({sets.pretrain_name})",
        lines=[
            Line(name, [mean.mark(int(key[1])) for key, mean in means.items() if key[0] == name])
            for name in names_of(means)
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
