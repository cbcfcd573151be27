"""`vitrail` itself: help, errors, switches, exit statuses, shell completion."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from vitrail.checkpoints import builtin
from vitrail.cli import COMMANDS, GROUPS, SWITCHES, changed_options, main
from vitrail.cli.completion import INSTALL
from vitrail.cli.console import LOG_INTERVAL, Progress, verbosity
from vitrail.cli.live import Live
from vitrail.cli.predict import Serve
from vitrail.cli.train import Train
from vitrail.export.api import Exported
from vitrail.export.verify import Int8Accuracy
from vitrail.planning.doctor import VARIABLES
from vitrail.training.config import OptimSettings, Settings

pytestmark = pytest.mark.slow

NO_WEIGHTS = "'ViT-B/16' is an architecture without weights; vitrail.create"
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def run_python(code: str) -> str:
    """Run code in a new process; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def images(tmp_path):
    """A dataset of two classes with one image each."""
    for name, color in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), color).save(tmp_path / "set" / name / "1.png")
    return tmp_path / "set"


# Help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"], ["--quiet"]])
def test_help_fits_on_a_screen_and_names_every_command(argv, capsys):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {*COMMANDS} <= {word for line in lines for word in line.split()}
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80


def test_help_version_and_completion_do_not_import_torch():
    printed = run_python(
        "import sys; from vitrail.cli import main\n"
        "for argv in (['--help'], ['--version'], ['completion', 'bash'], ['train', '--help']):\n"
        "    try: assert main(argv) == 0\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'fastapi', 'uvicorn'} & sys.modules.keys()\n"
    )
    assert f"vitrail {vitrail.__version__}\n" in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys, monkeypatch):
    """It fits 80 columns, lists the switches, and shows no internal values."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first line is tyro's usage
    assert all(f"--{switch}" in text for switch in SWITCHES)
    for internal in ("None", "''", "False)", "(default: )"):
        assert internal not in text, internal


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian", "images"], "unknown command 'trian'; did you mean 'train'?"),
        (["--bogus"], "unknown command '--bogus'; `vitrail --help` lists all commands"),
        (["train", "x", "--minuets", "3"], "unknown option --minuets; did you mean --minutes?"),
        (["train", "x", "--lr", "1"], "unknown option --lr; did you mean --optim.learning-rate?"),
        (["finetune", "x", "--ema", "0.9"], "unknown option --ema; did you mean --average?"),
        (["train", "x", "--minutes"], "--minutes needs a value; see vitrail train --help"),
        (["train", "x", "--steps", "a"], "--steps a: expected INT; see vitrail train --help"),
        (["train", "x", "--seed=a"], "--seed a: expected INT; see vitrail train --help"),
        (["train", "x", "--model.pool", "max"], "--model.pool max: expected one of cls, mean, map,"
         " cls+mean; see vitrail train --help"),
        (["evaluate"], "missing MODEL, DATA; see vitrail evaluate --help"),
        (["convert", "a", "b"], "missing --to {bundle,google,google-older,timm,huggingface,"
         "torchvision,bit_pytorch}; see vitrail convert --help"),
        (["check", "x", "y"], "unexpected argument 'y'; see vitrail check --help"),
        (["check", "x", "my photos"], "unexpected argument 'my photos'; see vitrail check --help"),
        (["finetune", "x", "y"], "unexpected argument 'y'; pass a pre-trained model with --from; "
         "see vitrail finetune --help"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_wrong_words_are_one_line_and_status_2(argv, message, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(argv) == 2
    assert capsys.readouterr().err == f"vitrail: {message}\n"


def test_unquoted_path_with_spaces_is_recognized(tmp_path, monkeypatch, capsys):
    (tmp_path / "my new photos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["check", "my", "new", "photos", "--strict"]) == 2
    assert capsys.readouterr().err.endswith("; quote a path with spaces: 'my new photos'\n")
    assert main(["check", "my", "old", "photos"]) == 2
    assert "quote" not in capsys.readouterr().err


def test_options_of_0_1_still_work_with_a_warning(capsys):
    assert main(["finetune", "x", "--ladder", "--resume", "--from", "y"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "vitrail: --ladder is now --search; the old name will be removed in 0.3"
    assert "--search cannot be resumed" in error
    assert main(["serve", "nowhere", "--max-pictures=300"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert "--max-pictures is now --max-images" in warning
    assert "a request of 300 images never fits" in error
    assert main(["finetune", "x", "--no-ladder", "--quiet", "--resume", "--search"]) == 2
    assert "is now" not in capsys.readouterr().err


def test_none_resets_a_setting_of_a_recipe(capsys):
    words = ["train", "--recipe", "deit-s16", "--print-settings"]
    for more, shown in ([], ["epochs = 300"]), (["--epochs", "None"], []):
        assert main([*words, *more]) == 0
        assert re.findall("^epochs = .*", capsys.readouterr().out, re.MULTILINE) == shown


# Switches


@pytest.mark.parametrize("argv", [["pack", "{}", "{}s", "-q"], ["--quiet", "pack", "{}", "{}s"]])
def test_quiet_leaves_the_result(argv, images, capsys):
    assert main([word.format(images) for word in argv]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("done: ")


@pytest.mark.parametrize(
    ("encoding", "name", "printed"),
    [("utf-8:strict", "\udcff", b"\xff"), ("ascii:replace", "é", b"?")],
)
def test_paths_may_be_any_bytes(images, tmp_path, encoding, name, printed):
    words = ["pack", str(images), str(tmp_path / name)]
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", *words],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/" + printed + b" (" in done.stdout


def test_quiet_silences_progress_and_the_view_of_a_run(capsys):
    def show_progress():
        progress = Progress()
        progress.shown -= LOG_INTERVAL
        progress(3, 10)
        live = Live(stderr=True)
        live.log("a choice")
        live.on_evaluate({"epoch": 1.0, "val/loss": 2.5})
        live.on_train_end()

    with verbosity(quiet=True, verbose=False):
        show_progress()
    assert capsys.readouterr() == ("", "")
    show_progress()
    lines = "3 of 10 images\na choice\n  val loss 2.500, epoch 1.0\n"
    assert capsys.readouterr() == ("", lines)


def test_commands_print_what_the_library_logs(capsys):
    logger = logging.getLogger("vitrail.checkpoints.load")
    for quiet, lines in ((False, "changed ?\nassumed\n"), (True, "assumed\n")):
        with verbosity(quiet=quiet, verbose=False):
            logger.info("changed \x1b")
            logger.warning("assumed")
        assert capsys.readouterr() == ("", lines)
    logger.info("changed")
    assert capsys.readouterr() == ("", "")


def test_verbose_prints_options_and_traceback(tmp_path, capsys):
    words = ["demo", "--out", str(tmp_path), "--seed", "-1"]
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*words, "-v"]) == 2
    errors = capsys.readouterr().err
    assert "  seed = -1\n" in errors
    assert "Traceback" in errors
    assert errors.splitlines()[-1] == "vitrail: --seed -1: must be 0 or more"


def test_changed_options_hide_the_token():
    settings = Settings(optim=OptimSettings(learning_rate=0.5))
    changed = list(changed_options(Train(data="images", settings=settings)))
    assert changed == ["data = 'images'", "settings.optim.learning_rate = 0.5"]
    changed = set(changed_options(Serve(models=("digits",), token="hush")))
    assert changed == {"models = ('digits',)", "token = ..."}


def test_no_control_codes_without_a_terminal_or_with_no_color(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # many CI systems set it
    live = Live()
    live.on_train_begin(0, 10)
    live.log("a choice")
    assert capsys.readouterr().out == "a choice\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for error_is_terminal, no_color, colored in ((1, "1", False), (0, "", False), (1, "", True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda value=error_is_terminal: value)
        monkeypatch.setenv("NO_COLOR", no_color)
        with pytest.raises(SystemExit):
            main(["models", "--help"])
        assert ("\x1b" in capsys.readouterr().out) == colored


# Exit statuses


def test_strict_check_is_status_1_and_one_line(images, capsys):
    assert main(["check", str(images), "--strict"]) == 0
    capsys.readouterr()
    (images / "cat" / "2.png").write_bytes(b"nothing")
    assert main(["check", str(images), "--strict", "--json"]) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["unreadable"]) == 1
    assert "1 unreadable files" in printed.err
    assert printed.err.count("\n") == 1


def test_closed_pipe_is_no_error():
    code = "import sys; from vitrail.cli import main; sys.exit(main(['models', '--like', 'mu']))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check nowhere", "Dataset not found: nowhere"),
        ("check fiels/", "Dataset not found: fiels/; did you mean 'FILES'?"),
        ("evaluate EMTPY builtin:sign-digits", "file not found: EMTPY; did you mean 'EMPTY'?"),
        ("check builtin:sign-digits --limit 0", "--limit 0: must be 1 or more"),
        ("pack builtin:sign-digits FILE/x", "FILE/x"),
        ("train", "no dataset given"),
        ("train EMPTY", "EMPTY"),
        ("train builtin:sign-digits --out FILE/x", "FILE/x"),
        ("train builtin:sign-digits --recipe nothing", "nothing"),
        ("train --resume --out EMPTY/none", "no run to resume in"),
        ("train --resume", "--resume needs --out"),
        ("finetune nowhere --quiet", "Dataset not found: nowhere"),
        ("finetune builtin:sign-digits --from builtin:vit --out OUT",
         "available: builtin:vit-photos"),
        ("fewshot", "no dataset given"),
        ("fewshot nowhere --quiet", "Dataset not found: nowhere"),
        ("predict builtin:sign-digits cat.jpg", "unknown built-in model 'builtin:sign-digits'"),
        ("finetune builtin:sign-digits --from ViT-B/16 --out OUT", NO_WEIGHTS),
        ("evaluate ViT-B/16 builtin:sign-digits", NO_WEIGHTS),
        ("evaluate EMPTY builtin:sign-digits", "EMPTY"),
        ("fewshot FILE builtin:sign-digits", "FILE"),
        ("teach nowhere thumb", "'thumb' is not CLASS=IMAGES, such as thumb=folder"),
        ("predict ViT-B/16 cat.jpg", NO_WEIGHTS),
        ("predict hf:some/model cat.jpg", "file not found: cat.jpg"),  # before any download
        ("inspect nowhere", "nowhere"),
        ("export ViT-B/16 --out model.onnx", NO_WEIGHTS),
        ("convert nowhere out --to timm", "nowhere"),
        ("serve ViT-B/16 --port 0", NO_WEIGHTS),
        *((words, NO_WEIGHTS) for words in ("inspect ViT-B/16", "convert ViT-B/16 OUT --to timm",
          "fewshot ViT-B/16 builtin:sign-digits", "teach ViT-B/16 a=cats/ --out OUT")),
        ("pack nowhere out", "Dataset not found: nowhere"),
        ("vtab nowhere tasks.toml", "tasks.toml"),
        ("reproduce table99", "unknown experiment 'table99'"),
        ("demo --minutes 0", "--minutes 0: must be greater than 0"),
        ("demo --out FILE/x", "cannot write into"),
        ("demo --out FILES", "contains other files; pass another --out"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("no folder")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILES").mkdir()
    (tmp_path / "FILES" / "letter.txt").write_text("mine")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("vitrail: ")
    assert message in error
    assert error.count("\n") == 1


def test_public_names_exist():
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vitrail.nonsense


# Commands that have no tests of their own


def test_models_are_listed_with_their_sizes(capsys):
    assert main(["models", "--like", "vit-b/16", "--json"]) == 0
    sizes = {row["name"]: row["parameters"] for row in json.loads(capsys.readouterr().out)}
    assert [*sizes] == ["ViT-B/16", "Axial-ViT-B/16", "R50+ViT-B/16"]
    assert [*sizes.values()] == [86_567_656, 171_620_584, 98_659_112]
    assert main(["models", "--like", "mixer-b"]) == 0
    assert "59,880,472" in capsys.readouterr().out
    for command in ("models", "recipes"):
        assert main([command, "--like", "no such name"]) == 1
        assert "lists all" in capsys.readouterr().out


def test_export_reports_the_difference_and_both_accuracies(tmp_path, monkeypatch, capsys):
    cost = Int8Accuracy(0.75, 0.5, 12, "images/")
    done = Exported(tmp_path / "m.onnx", "onnx", "ViT-Mu/4", 2**20, 1e-7, cost, ("a note",), 2.0)
    monkeypatch.setattr("vitrail.export.api.export_model", lambda *_, **__: done)
    assert main(["export", "bundle", "--out", "m.onnx"]) == 0
    printed = capsys.readouterr().out
    for words in ("ViT-Mu/4 -> onnx, 1.0 MiB", "int8 accuracy 50.0 %, float 75.0 % (n=12, images/)",
                  "a note", "features 1.0e-07", f"done in 2.0 s: {done.path}"):  # fmt: skip
        assert words in printed
    assert main(["export", "bundle", "--out", "m.onnx", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["path"] == str(done.path)
    assert values["cost"]["pictures"] == 12
    assert values["cost"].keys() >= {"accuracy", "int8_accuracy", "data"}


def test_demo_trains_and_draws_and_is_status_130_if_stopped(tmp_path, monkeypatch, capsys):
    from vitrail.training import trainer

    words = ["demo", "--out", str(tmp_path / "demo")]
    assert main([*words, "--minutes", "0.01"]) == 0
    assert (tmp_path / "demo" / "attention.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert re.search(r"^test accuracy \d+\.\d % \(n=409, ", out, re.MULTILINE)
    for few in ("built-in model", "raw pixels"):
        row = rf"^{few}, 5 images per class +50 +\d+\.\d ± \d+\.\d %$"
        assert bool(re.search(row, out, re.MULTILINE)) == bool(builtin.references())
    configs = []
    result = trainer.Result(folder=tmp_path, step=1, seconds=1.0, finished=False)
    monkeypatch.setattr(trainer, "run", lambda config, *_, **__: configs.append(config) or result)
    assert main([*words, "--quiet"]) == 130
    assert configs[0].overwrite  # the second demo replaces the first
    assert capsys.readouterr().out.startswith("stopped; ")


# Shell completion

ASK = {  # prints what is offered for the words up to the cursor; FILES where zsh completes files
    "bash": """{script}
COMP_WORDS=({quoted}); COMP_CWORD={last}; _vitrail; printf "%s\\n" "${{COMPREPLY[@]}}" """,
    "zsh": """_describe() {{ print -l -- ${{${{(P)2}}%%:*}}; compstate=(nmatches 1) }}
_files() {{ print FILES }}
typeset -A compstate=(nmatches 0); words=({quoted}); CURRENT=$#words; PREFIX={current}
{script}""",
    "fish": """{script}
complete -C '{typed}' | string replace --regex '\\t.*' '' """,
}


@pytest.mark.parametrize("shell", ASK)
def test_shell_completes_commands_options_values_and_files(shell, tmp_path, capsys):
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    (tmp_path / "images").mkdir()
    files = {"bash": set(), "zsh": {"FILES"}, "fish": {"images/"}}[shell]  # bash: -o default
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert set(COMMANDS) <= set(re.findall(r"[\w-]+", text))
    for typed, offered in {
        "tr": {"train"},
        "check --str": {"--strict"},
        "train images --optim.sched": {"--optim.schedule"},
        "convert a b --to goo": {"google", "google-older"},
        "check ima": files,
        "check --out ima": files or {"images"},
    }.items():
        words = ["vitrail", *typed.split()]
        quoted, last = " ".join(f'"{word}"' for word in words), len(words) - 1
        values = {"quoted": quoted, "current": words[-1], "last": last, "typed": " ".join(words)}
        ask = ASK[shell].format(script=text, **values)
        command = {"bash": ["bash"], "zsh": ["zsh", "-f"], "fish": ["fish", "--no-config"]}[shell]
        done = subprocess.run(command, input=ask, capture_output=True, text=True, cwd=tmp_path)
        assert (done.stderr, {*done.stdout.split()}) == ("", offered), typed
    if shell == "bash":
        assert "complete -o default -F _vitrail vitrail" in text


def test_completion_prints_the_script_or_how_to_install_it(capsys):
    assert main(["completion"]) == 0
    assert capsys.readouterr().out == f"{INSTALL}\n"
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef vitrail")


# docs/commands.md


def rows(title):
    """Return the first cells of the table below a heading, without their backticks."""
    part = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip().strip("`") for line in part.splitlines() if line[:1] == "|"]
    return cells[2:]


def test_page_lists_every_command_switch_status_and_variable():
    names = [name for group in GROUPS.values() for name in group]
    assert [row.split()[1] for row in rows("Commands")] == names
    switches = [row.split("`")[0] for row in rows("Common options")][:2]
    assert switches == ["--quiet", "--verbose"]
    assert rows("Exit status") == ["0", "1", "2", "70", "130"]
    assert rows("Environment") == [*VARIABLES, "VITRAIL_TOKEN"]
