"""What stays the same during a run: how many steps, where each is on the schedule, how it is done.

A run of a given length takes its steps one by one along the schedule. A run of a given time does
too, but when the machine turns out faster or slower than thought, the rest of the schedule is
spread over the steps that still fit (`spread_over`): the learning rate falls to its end on time.
"""

from dataclasses import dataclass

from vitrail.training.schedules import factor
from vitrail.training.settings import Settings

Stages = tuple[tuple[float, int], ...]


@dataclass
class Plan:
    """The way from step 0 to `steps`; `length` is how long the schedule was made."""

    settings: Settings
    length: int  # steps of the schedule
    accumulate: int = 1  # micro-batches per step
    processes: int = 1  # that share each of them
    stages: Stages = ()  # from which share of the schedule on, which image size
    evaluate_every: int = 0  # steps; 0: at the end only
    steps: int = 0  # the last step; differs from `length` once the rest was spread anew
    anchor: tuple[int, float] = (0, 0.0)  # a step, and where on the schedule it was

    def __post_init__(self) -> None:
        self.steps = self.steps or self.length

    def place(self, step: int) -> float:
        """Where on the schedule a step is: the step itself, unless the plan was changed."""
        begin, at = self.anchor
        if step <= begin:
            return at
        return at + (step - begin) * ((self.length - at) / (self.steps - begin))

    def progress(self, step: int) -> float:
        """The share of the schedule that is done before a step."""
        return min(1.0, self.place(step) / self.length)

    def rate(self, step: int) -> float:
        """The factor on all peak learning rates."""
        return factor(self.settings.optim, self.place(step), self.length)

    def size(self, step: int) -> int:
        """Pixels along each side of the pictures of a step."""
        progress = self.progress(step)
        return [size for start, size in self.stages if start <= progress][-1]

    def spread_over(self, step: int, steps: int) -> None:
        """Let the run end after `steps`, of which `step` are done."""
        self.anchor = (step, self.place(step))
        self.steps = max(step + 1, steps)

    def to_dict(self) -> dict[str, object]:
        """What a resumed run must know."""
        return {
            "length": self.length,
            "steps": self.steps,
            "anchor": list(self.anchor),
            "accumulate": self.accumulate,
            "processes": self.processes,
            "evaluate_every": self.evaluate_every,
        }

    def restore(self, values: dict[str, object]) -> None:
        """Go on with the plan that `to_dict` wrote.

        A batch stays cut as it was, since what is drawn for a part depends on that; unless the
        micro-batch is given, or another number of processes shares the batch, and has memory of
        its own. The samples are the same in either case.
        """
        match values:
            case {"length": int(length), "steps": int(steps), "anchor": [int(step), place]}:
                self.length, self.steps = length, steps
                self.anchor = (step, float(str(place)))
        match values:
            case {"accumulate": int(accumulate), "evaluate_every": int(every)}:
                self.evaluate_every = every
                same = values.get("processes", self.processes) == self.processes
                if same and self.settings.machine.micro_batch is None:
                    self.accumulate = accumulate
