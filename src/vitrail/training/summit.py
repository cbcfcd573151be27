"""The top of the ladder: the step that was chosen, on the whole training set, as a bundle."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from vitrail.checkpoints.adapt import with_head
from vitrail.checkpoints.load import load
from vitrail.checkpoints.save import save
from vitrail.data.origin import origin_of
from vitrail.errors import ConfigError, TrainingError
from vitrail.evaluation.outcome import Outcome
from vitrail.evaluation.quick import quick_outcome
from vitrail.models.build import Model
from vitrail.probing.memory import Memory, memory_beside
from vitrail.probing.others import fit_logistic
from vitrail.probing.teaching import learned
from vitrail.training import rungs
from vitrail.training.folder import BUNDLE, clear_run, write_run
from vitrail.training.ground import Ground
from vitrail.training.run import run
from vitrail.training.rungs import Rung, Seen
from vitrail.training.state import has_state

AT_ONCE = 64  # pictures that are evaluated together


def fit_again(ground: Ground, chosen: Rung, seen: Seen, device: torch.device) -> dict[str, Outcome]:
    """A probe of all training pictures that were seen, as the model's head."""
    model, classes = ground.learner.model, ground.material.train.classes
    memory = None  # what it takes to teach the model more
    if chosen.name == rungs.PROBE:
        model, memory = learned(model, seen.values, seen.labels, classes)
    else:
        probe = fit_logistic(seen.values, seen.labels, len(classes))
        model = with_head(model, *probe.linear(), classes)
    about = {"head": f"{chosen.name} on {len(seen.labels):,} pictures"}
    return write(ground, model, device, about, memory)


def train_again(
    ground: Ground, chosen: Rung, device: torch.device
) -> tuple[bool, dict[str, Outcome]]:
    """A run on all training pictures: whether it came to its end, and how good the result is.

    It is a run like any other, and can be resumed. Where there is no time for it, or it fails, the
    trial that was best is the result.
    """
    order, left, rate = ground.order, ground.clock.left(), chosen.rate
    freeze = rungs.frozen(chosen.name, ground.learner.model)
    assert rate is not None, "a step that is chosen has been tried"
    assert freeze is not None, "a step that is chosen has something to learn"
    problem = "no time is left to train on all pictures"
    if ground.clock.free() >= ground.clock.shortest:
        chosen_before = ground.learner.settings
        settings = replace(
            order.settings, optim=chosen_before.optim, head_init=chosen_before.head_init
        )
        settings = rungs.tuned(settings, rate, freeze, left)
        try:
            result = run(replace(order, settings=settings), ground.watch)
            return result.finished, result.outcomes
        except (ConfigError, TrainingError) as error:
            problem = str(error).partition(";")[0]
            clear_run(order.out)
        finally:
            if has_state(order.out):  # it was stopped; a model that is half trained is no result
                for name in BUNDLE:
                    (order.out / name).unlink(missing_ok=True)
    ground.watch.say(f"note: {problem}; the result is the model of the trial")
    return True, write(ground, load(ground.folder(chosen.name, rate)), device, {})


def write(
    ground: Ground,
    model: Model,
    device: torch.device,
    about: Mapping[str, object],
    memory: Memory | None = None,
) -> dict[str, Outcome]:
    """Make a model that is ready the bundle, then judge it; how good it is on each split."""
    order, settings, learner = ground.order, ground.learner.settings, ground.learner
    if order.overwrite:
        clear_run(order.out)
    write_run(order.out, settings, data=order.data, start=order.start)
    origin = origin_of(order.data, ground.material.train)
    provenance = {**origin.to_dict(), "from": order.start, **about}
    with nullcontext() if memory is None else memory_beside(memory, order.out):
        save(model.to("cpu"), order.out, provenance=provenance)
    model = model.to(device).eval()
    outcomes = {
        name: quick_outcome(
            model,
            samples,
            learner.preprocessing,
            loss=settings.loss.kind or "softmax",
            channels=model.config.channels,
            batch_size=AT_ONCE,
            workers=settings.machine.workers,
            device=device,
        )
        for name, samples in ground.material.judged.items()
    }
    accuracies = {f"{name} accuracy": round(o.accuracy, 6) for name, o in outcomes.items()}
    save(model.to("cpu"), order.out, provenance=provenance | accuracies)
    return outcomes
