"""`vitrail` itself: its first words, its switches, its statuses, and the Tab key."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Union

import pytest
import tyro

from vitrail.cli import COMMANDS, SWITCHES, main, with_switches
from vitrail.cli.completion import SAVE, Completion, all_words
from vitrail.cli.live import Live
from vitrail.cli.progress import EVERY, Progress
from vitrail.cli.serve import Serve
from vitrail.cli.text import chosen, manner
from vitrail.cli.train import Train
from vitrail.cli.welcome import GROUPS, welcome
from vitrail.planning.doctor import VARIABLES
from vitrail.training.config import OptimSettings, Settings

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


@pytest.fixture
def pictures(tmp_path):
    """A folder of two classes, one picture each, and a file that is none."""
    from PIL import Image

    for name, color in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), color).save(tmp_path / "set" / name / "1.png")
    return tmp_path / "set"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"], ["--quiet"]])
def test_the_first_words_fit_on_a_screen_and_name_every_command(argv, capsys):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == welcome().splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80


def test_every_command_is_in_one_group():
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(COMMANDS)


def test_an_unknown_command_is_one_line_with_a_suggestion(capsys):
    assert main(["trian", "pictures"]) == 2
    assert capsys.readouterr().err == "vitrail: unknown command 'trian'; did you mean 'train'?\n"
    assert main(["--bogus"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_option_is_answered_with_those_of_its_command_only(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "pictures", "--minuets", "3"])
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert "--minutes" in errors
    assert "vitrail demo" not in errors


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_eighty_columns_and_tells_the_switches(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80  # the line of usage is tyro's
    assert all(f"--{switch}" in "\n".join(lines) for switch in SWITCHES)


@pytest.mark.parametrize("argv", [["pack", "{}", "{}s", "-q"], ["--quiet", "pack", "{}", "{}s"]])
def test_quiet_leaves_the_result(argv, pictures, capsys):
    assert main([word.format(pictures) for word in argv]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("done: ")


def test_quiet_silences_progress_and_the_view_of_a_run(capsys):
    def go_on():
        progress = Progress()
        progress.shown -= EVERY
        progress(3, 10)
        live = Live(aside=True)
        live.log("a choice")
        live.on_evaluate({"epoch": 1.0, "val/loss": 2.5})
        live.on_train_end()

    with manner(quiet=True, verbose=False):
        go_on()
    assert capsys.readouterr() == ("", "")
    go_on()
    told = "3 of 10 images\na choice\n  val loss 2.500, epoch 1.0\n"
    assert capsys.readouterr() == ("", told)


def test_verbose_tells_the_options_and_where_an_error_comes_from(tmp_path, capsys):
    words = ["demo", "--out", str(tmp_path), "--seed", "-1"]
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*words, "-v"]) == 2
    errors = capsys.readouterr().err
    assert "  seed = -1\n" in errors
    assert "Traceback" in errors
    assert errors.splitlines()[-1].startswith("vitrail: minutes=2.95 must be above 0, seed=-1")


def test_options_are_told_where_they_differ_and_no_secret_is():
    settings = Settings(optim=OptimSettings(learning_rate=0.5))
    train = Train(data="pictures", settings=settings)
    assert list(chosen(train)) == ["data = 'pictures'", "settings.optim.learning_rate = 0.5"]
    assert list(chosen(Serve(models=(), token="hush"))) == ["models = ()", "token = ..."]


def test_strict_findings_are_status_1_and_one_line(pictures, capsys):
    assert main(["check", str(pictures), "--strict"]) == 0
    capsys.readouterr()
    (pictures / "cat" / "2.png").write_bytes(b"nothing")
    assert main(["check", str(pictures), "--strict", "--json"]) == 1
    told = capsys.readouterr()
    assert len(json.loads(told.out)["unreadable"]) == 1
    assert "mend them" in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("command", ["models", "recipes"])
def test_a_list_of_nothing_is_status_1(command, capsys):
    assert main([command, "--like", "no such name"]) == 1
    assert "lists all" in capsys.readouterr().out


def test_a_demo_that_is_stopped_is_status_130(tmp_path, monkeypatch, capsys):
    from vitrail.training import trainer

    result = trainer.Result(folder=tmp_path, step=1, seconds=1.0, finished=False)
    monkeypatch.setattr(trainer, "run", lambda *_, **__: result)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 130
    assert capsys.readouterr().out.startswith("stopped; ")


def test_there_are_no_control_codes_without_a_terminal_or_against_no_color(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # many builders set it, and read the log in a browser
    live = Live()
    live.on_train_begin(0, 10)
    live.log("a choice")
    assert capsys.readouterr().out == "a choice\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for error_is_terminal, no_color in ((True, "1"), (False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda told=error_is_terminal: told)
        monkeypatch.setenv("NO_COLOR", no_color)
        with pytest.raises(SystemExit):
            main(["models", "--help"])
        assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["models", "--help"])
    assert "\x1b" in capsys.readouterr().out


@pytest.fixture(scope="module")
def bash_script():
    """The script, made by a process that must not have loaded torch."""
    code = (
        "import sys; from vitrail.cli import main\n"
        "assert main(['completion', 'bash']) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train"}),
        ("check --str", {"--strict"}),
        ("train pictures --optim.sched", {"--optim.schedule"}),
        ("convert a b --to goo", {"google", "google-older"}),
        ("plan ViT-H", {"ViT-H/14"}),
        ("train --recipe dem", {"demo"}),
        ("check pict", set()),  # nothing of ours: the shell completes files
    ],
)
def test_bash_completes(typed, offered, bash_script):
    words = ["vitrail", *typed.split()]
    ask = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        '_vitrail; printf "%s\\n" "${COMPREPLY[@]}"; complete -p vitrail'
    )
    done = subprocess.run(["bash"], input=f"{bash_script}\n{ask}", capture_output=True, text=True)
    assert done.stderr == ""
    *found, registered = done.stdout.splitlines()
    assert set(filter(None, found)) == offered
    assert "-o default" in registered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_names_every_command_and_parses(shell, capsys):
    Completion(shell=shell).run()
    script = capsys.readouterr().out
    assert set(COMMANDS) <= set(re.findall(r"[\w-]+", script))
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_it_is_told_where_scripts_go(capsys):
    assert main(["completion"]) == 0
    told = capsys.readouterr().out
    assert SAVE in told
    assert max(map(len, told.splitlines())) <= 80


def test_completion_knows_the_options_that_tyro_takes(capsys):
    every = Union[
        *(Annotated[with_switches(c), tyro.conf.subcommand(name)] for name, c in COMMANDS.items())
    ]
    with pytest.raises(SystemExit):
        tyro.cli(every, prog="vitrail", args=["--tyro-write-completion", "bash", "-"])
    spec = re.search(r"^COMPLETION_SPEC = (.*)$", capsys.readouterr().out, re.MULTILINE)
    taken = {
        name: {flag for option in about["options"] for flag in option["flags"]} - {"-h", "-q", "-v"}
        for name, about in ast.literal_eval(spec[1])["subcommands"].items()
    }
    assert {name: set(known) - {""} for name, known in all_words().items()} == taken


def rows(title):
    """The first cells of the table below a heading of docs/commands.md, without their backticks."""
    part = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip().strip("`") for line in part.splitlines() if line[:1] == "|"]
    return cells[2:]


def test_the_page_has_every_command_and_only_those():
    assert [row.split()[1] for row in rows("Every command")] == [
        name for group in GROUPS.values() for name in group
    ]


def test_the_page_has_every_switch_status_and_variable():
    assert [row.split("`")[0] for row in rows("Switches of all commands")][:2] == [
        "--quiet",
        "--verbose",
    ]
    assert rows("Exit status") == ["0", "1", "2", "70", "130"]
    assert rows("Environment") == [*VARIABLES, "VITRAIL_TOKEN"]
