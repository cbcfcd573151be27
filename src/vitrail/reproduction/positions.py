"""Table 8: what kinds of position embedding, put where, are worth."""

from collections.abc import Mapping

from vitrail.reproduction.cells import PROBE, Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Row, dots
from vitrail.reproduction.means import accuracy, average, by_seed, fewshot, judged, numbers
from vitrail.reproduction.models import STEPS, pretraining, vit
from vitrail.reproduction.published import TABLE8
from vitrail.reproduction.report import Picture, Report, Table

SEEDS = 3
KINDS = {"none": "none", "learned": "1-D", "learned-2d": "2-D", "relative": "relative"}
PLACE_NAMES = {"stem": "stem", "every-layer": "every layer", "shared": "every layer, shared"}
GRID = list(TABLE8)  # the paper has relative positions in the column of the stem


def cells(sets: Sets) -> dict[Key, Cell]:
    usual = ("learned", "stem")  # as the other experiments have it, so that they share the run
    models = {
        (kind, place): vit(position=kind, position_place=place) if (kind, place) != usual else vit()
        for kind, place in GRID
    }
    return {
        (*key, seed): pretraining(sets, model, seed)
        for seed in range(SEEDS)
        for key, model in models.items()
    }


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    means, tested = by_seed(results, fewshot), by_seed(results, accuracy)
    bag = means["none", "stem"]
    placed = {key: mean for key, mean in means.items() if key != ("none", "stem")}
    gains = {key: mean - bag for key, mean in placed.items()}
    gain = average(list(placed.values())) - bag
    least, most = (pick(placed.values(), key=lambda mean: mean.mean) for pick in (min, max))
    clear = [shown_whole(*key) for key in GRID if key in gains and gains[key].low > 0]
    parts = [gain, gain - (most - least)]
    rows = [
        (
            KINDS[kind],
            PLACE_NAMES[place] if kind != "relative" else "in attention",
            f"{100 * TABLE8[kind, place]:.2f}",
            means[kind, place].text,
            "" if kind == "none" else gains[kind, place].signed,
            tested[kind, place].text,
        )
        for kind, place in GRID
    ]
    return EXPERIMENT.reported(
        did=(
            f"A ViT of 4 blocks, width 64 and 16 patches learned {sets.pretrain_name} for {STEPS} "
            f"steps with each kind of position, {SEEDS} seeds. They are compared by {PROBE}."
        ),
        found=(
            f"Without positions {bag.text} %; with them {gain.signed} points more on the average, "
            f"beyond doubt for {len(clear)} of {len(gains)} ({', '.join(clear) or 'none'}). The "
            f"best and the worst of them are {(most - least).signed} points apart. The parts of "
            "the claim: positions gain something on the average; kinds differ by less than that."
        ),
        verdict=judged(parts),
        tables=[
            Table(
                caption="5-shot accuracy in percent, and that of the models' own heads",
                head=("positions", "where", "published", "here", "against none", "own head"),
                rows=rows,
            )
        ],
        pictures=[
            Picture(
                file="table8.svg",
                caption="5-shot accuracy by kind and place of positions, published and here",
                content=dots(
                    {
                        "published (ImageNet)": [
                            Row(shown(*key), TABLE8[key], group=KINDS[key[0]]) for key in GRID
                        ],
                        f"here ({sets.pretrain_name})": [
                            means[key].row(shown(*key), KINDS[key[0]]) for key in GRID
                        ],
                    },
                    label="5-shot accuracy",
                ),
            )
        ],
        data={"fewshot": numbers(means), "test accuracy": numbers(tested)},
    )


def shown_whole(kind: str, place: str) -> str:
    return KINDS[kind] if kind == "relative" else f"{KINDS[kind]} ({PLACE_NAMES[place]})"


def shown(kind: str, place: str) -> str:
    return {"none": "a bag of patches", "relative": "in attention"}.get(kind, PLACE_NAMES[place])


EXPERIMENT = Experiment(
    name="table8",
    title="Positions matter, their kind does not",
    claim=(
        "A model without positions, to which a picture is a bag of patches, is clearly worse; "
        "how positions are encoded and where they are added makes little difference (published: "
        "none 61.4 %, all others 64.0 to 64.3 %, ImageNet 5-shot, ViT-B/16)."
    ),
    cells=cells,
    report=report,
)
