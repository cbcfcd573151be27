"""transformers in the race: its Trainer, set up as its image-classification example does it.

AdamW, clipping at 1, random resized crops and flips are the example's; its linear decay goes by
the clock.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchvision import transforms as t
from transformers import Trainer, TrainerCallback, TrainingArguments

import race_models as models
from race_clock import AccuracyClock
from race_peers import WORKERS, Task, Varied, logits_of
from race_sets import read

NEVER = 2**30  # steps: the clock ends the run


class TimedTrainer(Trainer):
    """Trainer whose learning rate schedule ends with the time."""

    def __init__(self, *args: Any, clock: AccuracyClock, **more: Any) -> None:
        super().__init__(*args, **more)
        self.clock = clock

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda step: 1 - self.clock.progress()
        )
        return self.lr_scheduler


class StopOnTime(TrainerCallback):
    """Start the clock before the first step and stop training when the time is over."""

    def __init__(self, clock: AccuracyClock, predict: Any) -> None:
        self.clock, self.predict = clock, predict

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = not self.clock.keep_training(self.predict)


def run_transformers(task: Task) -> dict[str, Any]:
    """A run of the Trainer."""
    steps = [t.RandomResizedCrop(task.size, task.variant.crop), t.RandomHorizontalFlip()]
    transform = t.Compose([*steps, t.ToTensor(), t.Normalize(**task.normal)])
    model = models.transformers_model(task.config)
    size = models.size_of(model, task.config)
    clock = AccuracyClock(*task.test_tensors(crop=1.0), task.seconds)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=NEVER,
            learning_rate=task.variant.rate,
            per_device_train_batch_size=task.variant.batch,
            seed=task.seed,
            use_cpu=True,
            dataloader_num_workers=WORKERS,
            dataloader_persistent_workers=WORKERS > 0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model,
            arguments,
            train_dataset=Varied(read(task.data, "train"), transform),
            data_collator=collate,
            callbacks=[StopOnTime(clock, logits_of(model))],
            clock=clock,
        )
        trainer.train()
    return size | clock.result()


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}
