"""Let torch compile the step where that is asked for and pays, which a few steps of each tell."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from vitrail import parallel
from vitrail.errors import ConfigError
from vitrail.training.cores import EachCoreAPart
from vitrail.training.pace import trial
from vitrail.training.watch import Watch

if TYPE_CHECKING:
    from vitrail.training.setup import Setup

PAYS = 0.97  # of the plain step's time; less of a gain is noise


def compile_if_it_pays(setup: "Setup", watch: Watch, *, resumed: bool) -> "Setup":
    """The setup with a compiled step, or as it is, with settings that say so.

    A resumed run goes on as it began: what was not worth it is not in its settings any more.
    """
    state = setup.state
    plain = state.wrapped
    whole = plain.objective if isinstance(plain, EachCoreAPart) else plain
    fast = compiled(whole)
    if resumed:
        state.wrapped = fast
        return setup
    size = setup.plan.stages[-1][1]
    watch.say("  compiling, and measuring whether it pays")
    before = trial(setup, size)
    state.wrapped = fast
    after = trial(setup, size)
    if parallel.from_first(after < PAYS * before):
        watch.say(f"  compiled: a step takes {after / before:.0%} of the time")
        return setup
    state.wrapped = plain
    watch.say(
        f"note: compiled steps take {after / before:.0%} of the time of plain ones here; "
        "the run goes on without machine.compile"
    )
    machine = replace(setup.settings.machine, compile=False)
    return replace(setup, settings=replace(setup.settings, machine=machine))


def compiled(module: nn.Module) -> nn.Module:
    """The module, compiled by torch on its first step."""
    from torch.utils.cpp_extension import check_compiler_ok_for_platform, get_cxx_compiler

    if not torch.cuda.is_available() and not check_compiler_ok_for_platform(get_cxx_compiler()):
        raise ConfigError(
            "machine.compile needs a C++ compiler and finds none; install g++, or leave it out"
        )
    return torch.compile(module)  # pyright: ignore[reportReturnType]: it is one
