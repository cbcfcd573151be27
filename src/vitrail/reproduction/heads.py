"""Appendix D.3: what the head reads, and what it is."""

from collections.abc import Mapping

from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import dots
from vitrail.reproduction.means import Mean, accuracy, by_seed, fewshot, numbers, tested
from vitrail.reproduction.models import BATCH, RATE, STEPS, pretraining, vit
from vitrail.reproduction.report import Picture, Report, Table, Verdict

SEEDS = 3
LEVEL = 0.02  # of accuracy: closer than this is as good
CLASS, MEAN, MLP = "class token", "mean of patches", "class token, MLP head"
HEADS = {CLASS: vit(), MEAN: vit(pool="mean"), MLP: vit(representation=64)}
RATES = (RATE, RATE / 3)


def cells(sets: Sets) -> dict[Key, Cell]:
    return {
        (head, rate, seed): pretraining(sets, model, seed, rate=rate)
        for seed in range(SEEDS)
        for head, model in HEADS.items()
        for rate in RATES
    }


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    means, few = by_seed(results, accuracy), by_seed(results, fewshot)
    rates = {head: max(RATES, key=lambda rate: means[head, rate].mean) for head in HEADS}
    best = {head: means[head, rate] for head, rate in rates.items()}
    gap = best[MEAN] - best[CLASS]
    return EXPERIMENT.reported(
        did=(
            f"The base ViT learned {sets.pretrain_name} with each head at two learning rates, "
            f"{STEPS} steps of {BATCH} pictures, {SEEDS} seeds; judged by {tested(results)} test "
            "pictures. The MLP head is a hidden layer of 64 with tanh before the classes."
        ),
        found=(
            f"Each at its better rate: class token {best[CLASS].text} % (rate {rates[CLASS]:g}), "
            f"mean of patches {best[MEAN].text} % (rate {rates[MEAN]:g}), a difference of "
            f"{gap.signed} points; with an MLP head {best[MLP].text} %. The claim is said to hold "
            f"if all of that interval lies within {100 * LEVEL:g} points of zero, and not to hold "
            "if all of it lies outside; else it cannot be told. "
            + (
                "That the mean wants a rate of its own is not seen: both prefer the same."
                if rates[MEAN] == rates[CLASS]
                else "And each wants its own learning rate, as in the paper."
            )
        ),
        verdict=level(gap),
        tables=[
            Table(
                caption="accuracies in percent",
                head=("head", "learning rate", "test", "5-shot"),
                rows=[
                    (str(head), f"{rate:g}", means[head, rate].text, few[head, rate].text)
                    for head, rate in means
                ],
            )
        ],
        pictures=[
            Picture(
                file="heads.svg",
                caption="Accuracy by what the head reads and by learning rate",
                content=dots(
                    {
                        name: [
                            found[head, rate].row(f"rate {rate:g}", head)
                            for head in HEADS
                            for rate in RATES
                        ]
                        for name, found in (("test accuracy", means), ("5-shot accuracy", few))
                    },
                    label="accuracy",
                ),
            )
        ],
        data={"accuracy": numbers(means), "fewshot": numbers(few)},
    )


def level(gap: Mean) -> Verdict:
    """Whether two are as good as each other."""
    if gap.low > -LEVEL and gap.high < LEVEL:
        return "holds"
    return "does not hold" if gap.low > LEVEL or gap.high < -LEVEL else "cannot be told"


EXPERIMENT = Experiment(
    name="heads",
    title="Class token or mean of patches: both do",
    claim=(
        "Reading the mean of all patches seemed much worse than a class token, until the learning "
        "rate was chosen for it: then both do about as well (figure 9, a picture only; class token "
        "at 8e-4, mean at 8e-4 and 3e-4)."
    ),
    cells=cells,
    report=report,
)
