"""What a finished run leaves behind: the bundle and the report."""

from typing import TYPE_CHECKING

from vitrail import distributed
from vitrail.checkpoints.save import save
from vitrail.data.origin import origin_of
from vitrail.evaluation.outcome import Outcome
from vitrail.formatting import duration
from vitrail.models.build import build
from vitrail.models.config import pair
from vitrail.models.registry import name_of
from vitrail.training.folder import REPORT
from vitrail.training.recipes import to_toml
from vitrail.training.report import Report, write_report

if TYPE_CHECKING:
    from vitrail.training.run import Run


def finish(run: "Run", outcomes: dict[str, Outcome]) -> None:
    """Write both; of several processes, the first does."""
    write_bundle(run, outcomes)
    if distributed.is_main():
        write_report(run.folder / REPORT, report_of(run, outcomes))


def write_bundle(run: "Run", outcomes: dict[str, Outcome]) -> None:
    """The model as it is now; all processes call this."""
    average = run.state.average
    if average is None:
        weights = distributed.gather_state_dict(run.state.objective)
    else:
        with average.applied():
            weights = distributed.gather_state_dict(run.state.objective)
    if not distributed.is_main():
        return
    learner = run.setup.learner
    model = build(learner.model.config)
    model.load_state_dict(weights, assign=True)  # which are a copy already
    model.metadata = learner.model.metadata
    save(model, run.folder, provenance=provenance(run, outcomes))


def provenance(run: "Run", outcomes: dict[str, Outcome]) -> dict[str, object]:
    """Where the weights come from, for the bundle."""
    facts: dict[str, object] = {
        **origin_of(run.order.data, run.setup.material.train).to_dict(),
        "steps": run.state.step,
        "seconds": round(run.elapsed(), 1),
        "seed": run.setup.settings.seed,
    }
    if run.order.start:
        facts["from"] = run.order.start
    return facts | {f"{name} accuracy": round(o.accuracy, 6) for name, o in outcomes.items()}


def report_of(run: "Run", outcomes: dict[str, Outcome]) -> Report:
    setup, step = run.setup, run.state.step
    config, train = setup.learner.model.config, setup.material.train
    height, width = pair(config.image_size)
    count = sum(p.numel() for p in setup.learner.model.parameters())
    assert run.records is not None
    return Report(
        title=run.folder.resolve().name,
        facts={
            "model": name_of(config),
            "parameters": f"{count:,}",
            "image size": f"{height} x {width} pixels",
            "data": run.order.data,
            "training pictures": f"{len(train):,} of {len(train.classes):,} classes",
            "steps": f"{step:,} ({setup.epochs(step):.1f} epochs)",
            "time": duration(run.elapsed()),
        },
        choices=setup.reasons,
        rows=run.records.rows,
        outcomes=outcomes,
        sources=dict(setup.material.judged),
        class_names=train.classes,
        settings_toml=to_toml(setup.settings),
        timings=run.timings,
        skipped=setup.feed.skipped,
        next_steps=[
            f"vitrail evaluate {run.folder} {run.order.data} --out {run.folder}/evaluation",
            f"vitrail inspect {run.folder} --out {run.folder}/inspection",
            f"vitrail convert {run.folder} model.safetensors --to timm",
        ],
    )
