"""Data, a model and settings → a bundle.

config.py          all settings of a run; recipes.py reads and writes them as TOML
auto_config.py     the settings that were left open, each decided with a reason
trainer.py         RunConfig → Trainer → fit: logging, evaluation, checkpoints, the bundle
loop.py            the training loop, TrainState, and evaluation on the held-out splits
data_module.py     the splits of a dataset, and the micro-batches of each step
model_init.py      the model at step 0: created or loaded, with a linear-probe head
objectives.py      model and loss as one module: classification, distillation, masked patches
optim.py           optimizers, parameter groups, frozen weights, the average of weights
schedules.py       learning rate and image size of every step; budget.py ends a run on time
cpu_parallel.py    one shard of the batch per core
memory.py          what a step needs and what is free
checkpoint.py      the resumable state; locks, signals, the cause of NaN
callbacks.py       events of a run, metrics.jsonl
adapt.py           search from a linear probe to full fine-tuning; VTAB-1k
"""
