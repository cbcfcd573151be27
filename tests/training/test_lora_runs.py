"""Runs with LoRA: what is trained, the adapter file, resuming, several processes."""

import json
from dataclasses import replace

import pytest
import torch
from kill_and_resume import kill_and_resume
from safetensors import safe_open
from safetensors.torch import save_file
from test_distributed import losses

import vitrail
from processes import in_two_processes
from tiny_runs import SETTINGS, Recorder, equal, tiny_run, weights
from vitrail.cli import main
from vitrail.models.attention import ATTENTIONS, SelfAttention
from vitrail.models.config import REGISTERED
from vitrail.models.lora import is_adapted
from vitrail.training.config import MachineSettings, ModelSettings, OptimSettings
from vitrail.training.recipes import ADAPTER, read_run
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.slow

ADAMW = OptimSettings(kind="adamw", learning_rate=1e-2, warmup_steps=0)
LORA = {"lora": 2, "model": ModelSettings(), "optim": ADAMW}


@pytest.fixture
def trainers(monkeypatch):
    """The trainers of all runs, at the end of each."""
    finished, finish = [], Trainer.finish

    def record(self):
        finished.append(self)
        return finish(self)

    monkeypatch.setattr(Trainer, "finish", record)
    return finished


def trained_parts(folder):
    with safe_open(folder / ADAPTER, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average": 0.9},
        {"machine": MachineSettings(micro_batch=3)},
        {"machine": MachineSettings(parts=2)},
        {"machine": MachineSettings(checkpointing=True)},
        {"head_init": "probe"},
    ],
    ids=["plain", "EMA", "accumulation", "shards", "checkpointing", "probe"],
)
def test_base_is_frozen_and_adapter_merges_into_it(
    colors, start, tmp_path, monkeypatch, trainers, changes
):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 0)
    recorder = Recorder()
    tiny_run(colors, tmp_path / "run", start=start, callback=recorder, **LORA, **changes)
    (trainer,) = trainers
    named = dict(trainer.state.objective.named_parameters())
    trained = {id(p) for p in named.values() if p.requires_grad}
    assert {p for o in trainer.state.optimizers for p in map(id, o.state)} == trained
    count = sum(p.numel() for p in named.values() if id(p) in trained)
    assert f"{count:,} trainable" in str(recorder.lines)
    before, after = weights(start), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        adapted = "blocks." in name and name.endswith(("qkv.weight", "merge.weight", "fc1.weight"))
        adapted = adapted or name.endswith("fc2.weight") or name.startswith("head.")
        assert torch.equal(after[name], tensor) != adapted, name
    assert all(map(is_adapted, trained_parts(tmp_path / "run")))
    merged = vitrail.load(start, adapter=tmp_path / "run" / ADAPTER)
    assert equal(merged.state_dict(), after)
    assert merged.metadata.class_names == ("red", "green", "blue")
    if not changes:  # the model that was trained and evaluated is the merged one
        images, model = torch.randn(4, 3, 8, 8), trainer.model.eval()
        expected = model(images)
        assert (merged(images) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"average": 0.9},
        {"head_init": "probe"},
        {"machine": MachineSettings(parts=2, micro_batch=3)},
    ],
    ids=["EMA", "probe", "shards"],
)
def test_resume_is_bit_exact(colors, start, tmp_path, monkeypatch, stop_after, changes):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 0)
    changes = LORA | {"model": ModelSettings(image_size=16)} | changes
    tiny_run(colors, tmp_path / "alone", start=start, **changes)
    merged = vitrail.load(start, adapter=tmp_path / "alone" / ADAPTER)  # of another image size
    assert merged.config == vitrail.load(tmp_path / "alone").config
    assert equal(merged.state_dict(), weights(tmp_path / "alone"))
    with stop_after(3):
        assert not tiny_run(colors, tmp_path / "stopped", start=start, **changes).finished
    assert tiny_run(colors, tmp_path / "stopped", start=start, resume=True, **changes).finished
    assert equal(weights(tmp_path / "alone"), weights(tmp_path / "stopped"))
    assert equal(*(trained_parts(tmp_path / name) for name in ("alone", "stopped")))


def test_run_below_the_probe_returns_the_probe(colors, start, tmp_path):
    recorder = Recorder()
    harmful = OptimSettings(kind="sgd", learning_rate=100.0, clip_norm=1.0, warmup_steps=0)
    changes = LORA | {"optim": harmful, "head_init": "probe"}
    tiny_run(colors, tmp_path / "run", start=start, callback=recorder, **changes)
    assert any("keeping the linear probe" in line for line in recorder.lines)
    before, after = weights(start), weights(tmp_path / "run")
    assert all(torch.equal(after[n], x) for n, x in before.items() if not n.startswith("head."))
    merged = vitrail.load(start, adapter=tmp_path / "run" / ADAPTER)
    assert equal(merged.state_dict(), after)


def test_convert_merges_an_adapter_and_overwriting_its_run_removes_it(
    colors, start, tmp_path, capsys
):
    tiny_run(colors, tmp_path / "run", start=start, **LORA)
    adapter = ["--adapter", str(tmp_path / "run" / ADAPTER)]
    command = ["convert", start, str(tmp_path / "merged"), "--to", "bundle", *adapter]
    assert main(command) == 0
    assert "changed: LoRA: merged" in capsys.readouterr().out
    assert equal(weights(tmp_path / "merged"), weights(tmp_path / "run"))
    tiny_run(colors, tmp_path / "run", start=start, overwrite=True, **LORA | {"lora": None})
    assert not (tmp_path / "run" / ADAPTER).exists()


def test_wrong_adapters_are_rejected(colors, start, tmp_path):
    tiny_run(colors, tmp_path / "run", start=start, **LORA)
    tiny_run(colors, tmp_path / "other", seed=1, steps=2)
    tiny_run(colors, tmp_path / "deeper", model=replace(SETTINGS.model, depth=3), steps=2)
    adapter = tmp_path / "run" / ADAPTER
    for base in ("other", "deeper"):
        with pytest.raises(vitrail.CheckpointError, match=r"adapts ViT.* with other weights"):
            vitrail.load(tmp_path / base, adapter=adapter)
    with safe_open(adapter, framework="pt") as file:
        header = json.loads(file.metadata()["vitrail-adapter"])
    wrong = [{"rank": 9}, {"rank": "x"}, {"model": {}}, {"base": 0}, {"preprocessing": 1}]
    wrong += [{"model": header["model"] | {key: 10**18}} for key in ("channels", "num_classes")]
    wrong += [{"model": header["model"] | {key: 2048}} for key in ("channels", "image_size")]
    for change in wrong:
        values = {"vitrail-adapter": json.dumps(header | change)}
        save_file(trained_parts(tmp_path / "run"), tmp_path / "wrong.safetensors", values)
        with pytest.raises(vitrail.CheckpointError, match=r"is not a LoRA adapter|adapts ViT"):
            vitrail.load(start, adapter=tmp_path / "wrong.safetensors")
    with pytest.raises(vitrail.CheckpointError, match="is not a LoRA adapter"):
        vitrail.load(start, adapter=tmp_path / "run" / "model.safetensors")
    with pytest.raises(vitrail.CheckpointError, match=r"not found|No such file"):
        vitrail.load(start, adapter=tmp_path / "nothing.safetensors")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["finetune", "--lora", "0"], "lora=0 must be a rank of 1 or more"),
        (["finetune", "--lora", "-3"], "lora=-3 must be a rank of 1 or more"),
        (["finetune", "--lora", "99"], "lora=99 must be a rank from 1 to 8"),
        (["finetune", "--lora", "2", "--lora-alpha", "0"], "lora_alpha=0.0 must be a positive"),
        (["finetune", "--lora", "2", "--search"], "leave out lora=2"),
        (["finetune", "--lora", "2", "--optim.kind", "muon"], "use optim.kind=adamw"),
        (["train", "--lora", "2"], "lora=2 adapts a pre-trained model, and none is given"),
    ],
)
def test_invalid_options_are_one_line(colors, start, tmp_path, capsys, args, message):
    command = [args[0], str(colors), *args[1:], "--out", str(tmp_path / "run"), "--steps", "2"]
    command += ["--from", start] if args[0] == "finetune" else []
    assert main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert message in line


def test_new_weights_of_a_registered_attention_are_not_left_untrained(
    colors, start, tmp_path, monkeypatch
):
    monkeypatch.setitem(ATTENTIONS, "own", type("Own", (SelfAttention,), {}))
    monkeypatch.setitem(REGISTERED, "attention", {"own"})
    model = ModelSettings(attention="own")
    with pytest.raises(
        vitrail.ConfigError, match=r"lora=2 .* would not be trained; leave out lora"
    ):
        vitrail.train(colors, tmp_path / "run", start=start, lora=2, model=model, steps=1)


def test_rank_cannot_be_changed_when_resuming(colors, start, tmp_path, stop_after):
    with stop_after(2):
        tiny_run(colors, tmp_path / "run", start=start, **LORA)
    for change in ({"lora": 3}, {"lora_alpha": 8.0}):
        with pytest.raises(vitrail.ConfigError, match=r"lora.* cannot be changed when a run is"):
            vitrail.train(colors, tmp_path / "run", resume=True, **change)


def test_automatic_settings(colors, start, tmp_path):
    recorder = Recorder()
    vitrail.train(colors, tmp_path / "run", start=start, steps=2, lora=2, callback=recorder)
    settings, _, _ = read_run(tmp_path / "run")
    assert (settings.optim.kind, settings.optim.layer_decay) == ("adamw", 1.0)
    assert settings.head_init == "zeros"  # the classes are those of the start
    rate = f"AdamW, learning rate {settings.optim.learning_rate:g}, layer decay 1: default for LoRA"
    assert any(rate in line for line in recorder.lines)


def test_resume_after_kill_is_bit_exact(start, tmp_path):
    _, different = kill_and_resume(tmp_path, kills=1, seed=0, base=start, steps=40)
    assert not different


def test_several_processes_match_one(colors, start, tmp_path):
    options = ["finetune", str(colors), "--steps", "6", "--batch-size", "8", "--average", "0.9"]
    options += ["--optim.kind", "sgd", "--optim.learning-rate", "0.1", "--optim.clip-norm", "1"]
    options += ["--mix.cutmix", "0", "--machine.precision", "float32", "--from", start]
    options += ["--lora", "3", "--out"]
    assert main([*options, str(tmp_path / "one")]) == 0
    for strategy in ("ddp", "fsdp"):
        out = tmp_path / strategy
        args = [*options, str(out), "--machine.strategy", strategy]
        in_two_processes(tmp_path, main, args)
        assert losses(out) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        for name, tensor in weights(tmp_path / "one").items():
            torch.testing.assert_close(weights(out)[name], tensor, atol=1e-5, rtol=1e-4)
        merged = vitrail.load(start, adapter=out / ADAPTER)
        assert equal(merged.state_dict(), weights(out))
