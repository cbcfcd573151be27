import json
import subprocess
import sys

import pytest

import vitrail
from vitrail.cli import main


def test_help_and_version_do_not_load_torch():
    code = (
        "import sys; from vitrail.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "main(['--version'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert vitrail.__version__ in done.stdout
    assert "models" in done.stdout


def test_the_module_runs_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"vitrail {vitrail.__version__}\n"


def test_models_are_listed_with_their_sizes(capsys):
    assert main(["models", "--like", "vit-b/16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["parameters"]) for row in rows] == [
        ("ViT-B/16", 86_567_656),
        ("R50+ViT-B/16", 98_659_112),
    ]


def test_the_table_of_models_is_for_people(capsys):
    assert main(["models", "--like", "mixer-b"]) == 0
    assert "59,880,472" in capsys.readouterr().out


def test_a_user_error_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "below")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vitrail: cannot write into")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        *("predict NAME cat.jpg", "evaluate NAME DATA", "serve NAME --port 0", "inspect NAME"),
        *("fewshot NAME DATA", "finetune DATA --from NAME --out OUT"),
        *("export NAME --out OUT", "convert NAME OUT --to timm", "teach NAME a=cats/ --out OUT"),
    ],
)
def test_a_name_is_not_taken_for_a_trained_model(words, tmp_path, capsys):
    places = {"NAME": "ViT-B/16", "DATA": "builtin:sign-digits", "OUT": str(tmp_path / "o.onnx")}
    assert main([places.get(word, word) for word in words.split()]) == 2
    assert (
        "'ViT-B/16' is an architecture without weights; vitrail.create" in capsys.readouterr().err
    )


def test_the_demo_leaves_a_picture(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.01"]) == 0
    assert main(["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.01"]) == 0  # once more
    assert (tmp_path / "demo" / "attention.png").stat().st_size > 1000
    assert "of 409 new photographs are classified correctly" in capsys.readouterr().out


def test_impossible_demos_are_one_line(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--seed", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "letter.txt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "holds something else; name another --out" in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_is_no_error():
    code = "import sys; from vitrail.cli import main; sys.exit(main(['models', '--like', 'mu']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert errors == b""


def test_public_names_are_all_there():
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vitrail.nonsense


def test_resuming_where_there_is_no_run_says_so(tmp_path, capsys):
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "no run to resume in" in capsys.readouterr().err
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err
