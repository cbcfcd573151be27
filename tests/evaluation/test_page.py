import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from page_reader import Reader
from vitrail import DataError
from vitrail.data.datasets import Sample, open_dataset
from vitrail.evaluation import page as module
from vitrail.evaluation.diagrams import at_share, reliability, trade_off
from vitrail.evaluation.findings import Calibration, ClassFinding, Estimate, Findings, Selective
from vitrail.evaluation.outcome import Mistake, Outcome
from vitrail.evaluation.page import write_evaluation
from vitrail.evaluation.parts import likely
from vitrail.evaluation.verdict import gap_of_luck, times_of, verdict

EVIL = "<script>alert(1)</script>\"'&"
FACTS = {"model": "ViT-Pico/8", "data": "signs"}
NAN = math.nan


@pytest.fixture(scope="module")
def source():
    return open_dataset("builtin:sign-digits", "test")


def calibration(counts, confidence, accuracy, **more):
    """Four bins; the rest follows, unless given."""
    counts, sure, right = np.array(counts), np.array(confidence), np.array(accuracy)
    gaps = np.where(counts > 0, abs(sure - right), 0)
    given = {
        "ece": float((counts * gaps).sum() / max(counts.sum(), 1)),
        "brier": 0.125,
        "temperature": 1.7,
        "ece_scaled": 0.01,
    }
    edges = np.linspace(0, 1, len(counts) + 1)
    return Calibration(edges=edges, counts=counts, confidence=sure, accuracy=right, **given | more)


TOO_SURE = calibration([0, 9, 100, 300], [NAN, 0.4, 0.6, 0.9], [NAN, 0.5, 0.6, 0.8])


def confused(names, source):
    """40 pictures of each class, all known but 8 of the fourth class, taken for the sixth."""
    confusion = 40 * np.eye(len(names), dtype=np.int64)
    confusion[3, [3, 5]] = 32, 8
    classes = [ClassFinding(name, 40, 1.0, 1.0, 1.0) for name in names]
    classes[3] = ClassFinding(names[3], 40, 1.0, 0.8, 0.889)
    classes[5] = ClassFinding(names[5], 40, 0.833, 1.0, 0.909)
    samples = 40 * len(names)
    return Findings(
        outcome=Outcome(
            samples=samples,
            accuracy=1 - 8 / samples,
            top5=1.0,
            loss=0.123,
            confusion=confusion,
            mistakes=tuple(Mistake(n, source.name(n), 3, 5, 0.97, 0.01) for n in range(2)),
            skipped={"a.jpg": "it is cut off"},
        ),
        estimates={
            "accuracy": Estimate(1 - 8 / samples, 0.961, 0.993),
            "top5": Estimate(0.9976, 0.99, 1.0),
            "balanced_accuracy": Estimate(0.974, 0.955, 0.99),
            "ece": Estimate(0.0754, 0.05, 0.09),
            "accuracy_at_80": Estimate(0.991, 0.98, 1.0),
            "loss": Estimate(0.123, 0.1, 0.2),
        },
        classes=tuple(classes),
        calibration=TOO_SURE,
        selective=Selective(
            coverage=np.array([0.25, 0.5, 0.8, 1]), accuracy=np.array([1, 1, 0.991, 0.98])
        ),
        notes=("classes were matched by `name`",),
    )


@pytest.fixture
def findings(source):
    return confused(source.classes, source)


def several(source):
    """Where more than one class may apply."""
    names = ("person", "car", "dog")
    return Findings(
        outcome=Outcome(
            samples=200,
            accuracy=0.9,
            top5=None,
            loss=0.5,
            confusion=None,
            mistakes=(Mistake(0, "x", (0, 2), 1, 0.9, 0.1), Mistake(1, "y", (), 1, 0.8, 0.0)),
            skipped={},
        ),
        estimates={
            "mean_average_precision": Estimate(0.713, 0.69, 0.74),
            "f1_micro": Estimate(0.771, 0.75, 0.79),
            "f1_macro": Estimate(0.702, NAN, NAN),
        },
        classes=tuple(ClassFinding(name, 50, 0.8, 0.7, 0.75, 0.812) for name in names),
    )


def written(findings, source, tmp_path, title="my model", facts=FACTS):
    path = tmp_path / "evaluation.html"
    write_evaluation(path, findings, title=title, facts=facts, source=source)
    return path.read_text(encoding="utf-8")


def said(text):
    return " ".join(Reader(text).said)


def test_the_page_tells_everything_and_asks_nothing_of_the_network(findings, source, tmp_path):
    text = written(findings, source, tmp_path)
    reader = Reader(text)
    assert len(reader.asked) == 2
    assert all(value.startswith("data:image/") for value in reader.asked)
    for outside in ("http://", "https://", "<script", "url(", "nan", "inf "):
        assert outside not in text, outside
    assert len(text) < 100_000
    words = " ".join(reader.said)
    for expected in (
        *("my model", "ViT-Pico/8 on signs", "98.0\xa0%", "likely 96.1 to 99.3\xa0%"),
        *("392 of 400 right", "99.8\xa0%", "97.4\xa0%", "7.5\xa0%", "99.1\xa0%", "0.123"),
        *("classes were matched by", "32 of 40", "83.3\xa0%", "88.9\xa0%", "0.125", "1.7"),
        *("Which classes are mixed up", "Each class", "Is it as sure as it is right?"),
        *("What if it may leave some out?", "Most confident mistakes", "(97\xa0%)"),
        "it is cut off",
    ):
        assert expected in words, expected


def test_sections_come_in_the_order_in_which_they_are_asked_for(findings, source, tmp_path):
    text = written(findings, source, tmp_path)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Which classes are mixed up",
        "Each class",
        "Is it as sure as it is right?",
        "What if it may leave some out?",
        "Most confident mistakes",
        "Files that could not be read (1)",
    ]
    places = [text.index(x) for x in ('class="tiles"', 'class="facts"', "matched", '"verdict"')]
    assert places == sorted(places)
    levels = [int(tag[1]) for tag, _ in Reader(text).seen if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_names_from_files_cannot_change_the_page(findings, source, tmp_path):
    names = [f"{n}{EVIL}" for n in range(10)]
    evil = confused(names, source)
    outcome = replace(
        evil.outcome, mistakes=(Mistake(0, EVIL, 0, 1, 0.5, 0.1),), skipped={EVIL: EVIL}
    )
    evil = replace(evil, outcome=outcome, notes=(EVIL, f"`{EVIL}`"))
    facts = {EVIL: EVIL, "model": EVIL}
    text = written(evil, source, tmp_path, EVIL, facts)
    assert "<script" not in text
    assert not [tag for tag, _ in Reader(text).seen if tag == "script"]
    assert "taken for" in text


def test_what_cannot_be_said_is_a_dash(findings, source, tmp_path):
    nothing = Estimate(NAN, NAN, NAN)
    absent = ClassFinding("absent", 0, NAN, NAN, NAN)
    blind = calibration([0] * 4, [NAN] * 4, [NAN] * 4, ece=NAN, temperature=NAN, brier=NAN)
    confusion = findings.outcome.confusion.copy()
    confusion[0] = 0
    odd = replace(
        findings,
        outcome=replace(findings.outcome, loss=NAN, confusion=confusion),
        estimates=dict.fromkeys(findings.estimates, nothing),
        classes=(absent, *findings.classes[1:]),
        calibration=blind,
        selective=Selective(coverage=np.array([1.0]), accuracy=np.array([NAN])),
    )
    text = written(odd, source, tmp_path)
    assert "nan" not in text.lower()
    assert "—" in said(text)
    assert "likely" not in text
    rows = re.findall(r"<tr><td>(.*?)</td>", text)
    assert rows[0] == "3"  # the worst first
    assert rows[-1] == "absent"
    assert "“absent”" not in text  # nobody can find what is not there


def test_a_model_without_mistakes_has_nothing_to_leave_out(findings, source, tmp_path):
    right = replace(
        findings,
        outcome=replace(
            findings.outcome,
            accuracy=1.0,
            mistakes=(),
            skipped={},
            confusion=40 * np.eye(10, dtype=np.int64),
        ),
        classes=tuple(ClassFinding(str(n), 40, 1.0, 1.0, 1.0) for n in range(10)),
        calibration=calibration([0, 0, 0, 400], [NAN] * 3 + [1.0], [NAN] * 3 + [1.0]),
    )
    text = written(right, source, tmp_path)
    for missing in ("mistakes</h2>", "leave some out", "could not be read"):
        assert missing not in text
    assert "It is right every time, on 400 pictures." in said(text)
    assert "can be believed" in said(text)
    assert "least often" not in text


def test_findings_that_tell_little_are_a_page(findings, source, tmp_path):
    outcome = Outcome(samples=1, accuracy=0.0, top5=None, loss=1.0, confusion=None, skipped={})
    text = written(Findings(outcome=outcome, estimates={}, classes=()), source, tmp_path)
    assert "<h2>" not in text
    assert "0 of 1 right" in said(text)
    assert "It is right on 0 of 1 picture." in said(text)


def test_several_labels_have_their_own_numbers(source, tmp_path):
    text = written(several(source), source, tmp_path)
    words = said(text)
    for expected in ("mAP", "71.3\xa0%", "F1 micro", "77.1\xa0%", "F1 macro", "70.2\xa0%", "AP"):
        assert expected in words
    assert "81.2\xa0%" in words
    assert "<b>person, dog</b>" in text
    assert "<b>none</b>" in text
    assert "The class it is surest of applies 90 times of 100." in words
    for missing in ("Which classes", "Is it as sure", "balanced"):
        assert missing not in text


def test_two_hundred_classes_fold_their_table_and_stay_small(source, tmp_path):
    names = [f"a rather long name of class {n}" for n in range(200)]
    text = written(confused(names, source), source, tmp_path)
    assert len(text) < 200_000
    folded = re.search(r"<details><summary>All 200 classes.*?</details>", text, re.DOTALL)
    assert folded is not None
    assert folded.group().count("<tr>") == 201


def test_a_short_table_is_open(findings, source, tmp_path):
    assert "<details>" not in written(findings, source, tmp_path)


def test_pictures_that_cannot_be_read_again_are_left_out(findings, tmp_path):
    class Gone:
        def __getitem__(self, index) -> Sample:
            raise DataError("it is gone")

    text = written(findings, Gone(), tmp_path)
    assert "<img" not in text
    assert "taken for" in text


def test_a_page_that_cannot_be_made_leaves_the_old_one(findings, source, tmp_path, monkeypatch):
    old = written(findings, source, tmp_path)

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "unreadable", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(findings, source, tmp_path)
    assert (tmp_path / "evaluation.html").read_text(encoding="utf-8") == old


def test_what_was_given_comes_before_what_was_found(findings, source, tmp_path):
    names = re.findall(r"<dt>(.*?)</dt>", written(findings, source, tmp_path))
    assert names[:5] == ["model", "data", "pictures", "classes", "loss"]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.961, 0.993, "likely 96.1 to 99.3"),
        (0.9, 1.0, "likely 90.0 to 100"),
        (0.9997, 0.99996, "likely 99.9 to 99.9"),  # a hundred only where nothing is missing
        (0.0, 0.04, "likely 0.0 to 4.0"),
    ],
)
def test_an_interval_is_told_as_its_value_is(low, high, words):
    assert f">{words}&nbsp;%<" in likely(low, high)


def test_the_verdict_names_what_is_weak(findings):
    sentences = list(verdict(findings))
    assert sentences[0] == "It is right 98 times of 100."
    assert sentences[2:] == [
        "If it may leave out the fifth it is least sure of, 99.1 % of the rest are right.",
        "It finds “3” least often: 32 of 40.",
        "It takes “3” for “5” most often: 8 times, which is 20 % of the pictures of “3”.",
    ]


def confidence_verdict(findings, calibration):
    return list(verdict(replace(findings, calibration=calibration)))[1]


def test_the_verdict_says_whether_confidence_can_be_believed(findings):
    assert confidence_verdict(findings, TOO_SURE) == (
        "When it says it is 90 % sure, it is right 80 times of 100: it is too sure; dividing its "
        "logits by 1.7 would mend most of that: `vitrail evaluate … --save-temperature`."
    )
    shy = calibration([0, 0, 200, 200], [NAN, NAN, 0.6, 0.8], [NAN, NAN, 0.9, 0.9], ece_scaled=0.2)
    assert confidence_verdict(findings, shy) == (
        "When it says it is 60 % sure, it is right 90 times of 100: it is not sure enough."
    )
    both = calibration([0, 0, 200, 210], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.8, 0.7], ece_scaled=1.0)
    assert confidence_verdict(findings, both) == (
        "When it says it is 90 % sure, it is right 70 times of 100: "
        "it is too sure there, and the reverse elsewhere."
    )
    near = calibration([0, 0, 0, 400], [NAN] * 3 + [0.997], [NAN] * 3 + [0.9], ece_scaled=0.05)
    assert "says it is 99.7 % sure" in confidence_verdict(findings, near)
    assert "mend some of that" not in confidence_verdict(findings, replace(near, ece_scaled=0.09))
    assert "mend some of that" in confidence_verdict(findings, near)


def test_a_gap_that_chance_explains_is_not_held_against_a_model(findings):
    few = calibration([0, 0, 15, 25], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.667, 0.84])
    many = replace(few, counts=100 * few.counts)
    assert "by chance" in confidence_verdict(findings, few)
    assert "too sure" in confidence_verdict(findings, many)


def test_the_gap_of_luck_is_passed_once_in_twenty():
    rng = np.random.default_rng(0)
    counts, sure = np.array([20, 50, 200, 400]), np.array([0.3, 0.55, 0.8, 0.95])
    right = rng.binomial(counts, sure, (4000, 4)) / counts
    errors = (abs(right - sure) * counts).sum(axis=1) / counts.sum()
    limit = gap_of_luck(calibration(counts, sure, sure))
    assert 0.03 < (errors > limit).mean() < 0.07


def test_unsureness_that_is_worth_nothing_is_said(findings):
    flat = Selective(coverage=np.array([0.5, 1.0]), accuracy=np.array([0.97, 0.98]))
    unsure = replace(findings, selective=flat, estimates={})
    assert "hardly helps" in list(verdict(unsure))[2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.93, "93 times of 100"),
        (0.996, "996 times of 1,000"),
        (0.004, "4 times of 1,000"),
        (0.01, "once of 100"),
        (1.0, "every time"),
        (0.0, "never"),
    ],
)
def test_only_always_is_every_time(value, words):
    assert times_of(value) == words


def drawn(svg):
    assert "nan" not in svg
    return ET.fromstring(svg)


def test_a_reliability_bar_is_as_high_as_its_accuracy_and_its_gap_reaches_the_confidence():
    root = drawn(reliability(TOO_SURE))
    told = [e.text for e in root.iter("title")]
    assert told[2] == "75 to 100 % sure, 90.0 % on average: 300 answers, 80.0 % right"
    assert len(told) == 3  # the empty bin has no bar
    high = {
        kind: [float(e.get("height", "")) for e in root.iter("rect") if e.get("class") == kind]
        for kind in ("right", "over", "under", "many")
    }
    assert high["right"][2] / high["over"][-1] == pytest.approx(8, rel=0.01)  # 0.8 and 0.1
    assert high["under"] == pytest.approx([high["over"][-1]], rel=0.01)  # 0.4 to 0.5
    assert high["many"][1] / high["many"][2] == pytest.approx(1 / 3, rel=0.05)
    assert [e.get("class") for e in root.iter("g") if e.get("class")] == ["few", "enough", "enough"]
    assert "7.6 %" in root.get("aria-label", "")


def test_the_trade_off_marks_the_surest_four_fifths():
    coverage = np.arange(1, 1001) / 1000
    svg = trade_off(Selective(coverage=coverage, accuracy=1 - coverage**3 / 10), 0.9488, least=0.02)
    texts = [e.text for e in drawn(svg).iter("text")]
    assert "94.9 %" in texts
    assert "90.0 %" in texts
    assert len(svg) < 20_000


@pytest.mark.parametrize("accuracy", [[1.0, 1.0], [0.0, 0.0], [NAN, 0.5], [0.2, 0.9]])
def test_any_trade_off_is_a_chart(accuracy):
    both = Selective(coverage=np.array([0.5, 1.0]), accuracy=np.array(accuracy))
    assert list(drawn(trade_off(both, 0.5)).iter("text"))


def test_no_trade_off_is_no_chart():
    assert trade_off(Selective(coverage=np.array([]), accuracy=np.array([])), NAN) == ""
    assert trade_off(Selective(coverage=np.array([1.0]), accuracy=np.array([NAN])), NAN) == ""


def test_the_accuracy_at_a_share_is_that_of_at_least_so_many():
    selective = Selective(coverage=np.array([0.5, 0.8, 1.0]), accuracy=np.array([3.0, 2.0, 1.0]))
    assert [at_share(selective, x) for x in (0.1, 0.5, 0.6, 0.8, 0.81, 1)] == [3, 3, 2, 2, 1, 1]
