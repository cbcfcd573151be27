"""Let torch compile the step where that is asked for and pays, which a few steps of each tell."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from vitrail import distributed
from vitrail.extras import check_compiler
from vitrail.training.cores import EachCoreAPart
from vitrail.training.pace import trial
from vitrail.training.settings import Settings
from vitrail.training.watch import Watch

if TYPE_CHECKING:
    from vitrail.training.setup import Setup

PAYS = 0.97  # of the plain step's time; less of a gain is noise


def compile_if_it_pays(setup: "Setup", watch: Watch, *, began: Settings | None) -> "Setup":
    """The setup with a compiled step, or as it is, with settings that say so.

    A resumed run goes on as it began, by the settings it wrote then.
    """
    plain = setup.state.wrapped
    whole = plain.objective if isinstance(plain, EachCoreAPart) else plain
    setup.state.wrapped = compiled(whole)
    pays = began.machine.compile if began else faster(setup, plain, watch)
    if pays:
        return setup
    setup.state.wrapped = plain
    machine = replace(setup.settings.machine, compile=False)
    return replace(setup, settings=replace(setup.settings, machine=machine))


def faster(setup: "Setup", plain: nn.Module, watch: Watch) -> bool:
    """Whether the step that is set up takes less time than the plain one; told."""
    watch.say("  compiling, and measuring whether it pays")
    fast, size = setup.state.wrapped, setup.plan.stages[-1][1]
    after = trial(setup, size)
    setup.state.wrapped = plain
    before = trial(setup, size)
    setup.state.wrapped = fast
    share = distributed.broadcast_object(after / before)
    ending = "it stays" if share < PAYS else "the run goes on without machine.compile"
    watch.say(f"  a compiled step takes {share:.0%} of the time of a plain one: {ending}")
    return share < PAYS


def compiled(module: nn.Module) -> nn.Module:
    """The module, compiled by torch on its first step."""
    if not torch.cuda.is_available():
        check_compiler("machine.compile", "leave it out")
    return torch.compile(module)  # pyright: ignore[reportReturnType]: it is one
