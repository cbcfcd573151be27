from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import BOUNDARY, form_body

from vitrail.serving.bodies import form_files
from vitrail.serving.refusals import Refusal
from vitrail.serving.room import Room
from vitrail.serving.settings import Limits

TYPE = f"multipart/form-data; boundary={BOUNDARY}"
LIMITS = Limits(pictures=8)


def files(body, kind=TYPE, limits=LIMITS):
    return form_files(kind, body, limits)


def part(head, data=b"x"):
    start, end = f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode(), f"\r\n--{BOUNDARY}--\r\n".encode()
    return start + data + end


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_files_come_out_of_a_form_as_they_went_in(pictures):
    found = files(form_body(pictures))
    assert [upload.data for upload in found] == pictures
    assert [upload.name for upload in found] == [f"{n}.jpg" for n in range(len(pictures))]


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_bytes_are_more_than_refused(body):
    with pytest.raises(Refusal) as refusal:
        files(body)
    assert refusal.value.status == 400


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_damaged_form_is_read_or_refused(place, noise):
    body = form_body([b"first", b"second"])
    damaged = body[: place % len(body)] + noise + body[place % len(body) + len(noise) :]
    with suppress(Refusal):
        files(damaged)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (form_body([b"x"]), "multipart/form-data", "names no boundary"),
        (form_body([b"x"])[:-10], TYPE, "ends too early"),
        (part("Content-Type: image/png"), TYPE, "does not say what it is"),
        (f"--{BOUNDARY}\r\nno end".encode(), TYPE, "has no headers"),
        (b"", TYPE, "ends too early"),
        (part("X: " + 5000 * "x"), TYPE, "has no headers"),
    ],
)
def test_a_broken_form_is_refused_in_one_line(body, kind, said):
    with pytest.raises(Refusal, match=said) as refusal:
        files(body, kind)
    assert refusal.value.status == 400


def test_other_fields_are_passed_over_but_not_any_number():
    assert files(form_body([b"x"], field="comment")) == []
    with pytest.raises(Refusal, match="more than 16 other fields"):
        files(form_body([b"x"] * 17, field="comment"))


def test_more_pictures_than_are_allowed_are_refused():
    assert len(files(form_body([b"x"] * 8))) == 8
    with pytest.raises(Refusal, match="more than 8 pictures") as refusal:
        files(form_body([b"x"] * 9))
    assert refusal.value.status == 413


def test_names_in_any_letters_come_back_and_are_not_endless():
    head = 'content-disposition: form-data; name="pictures"; filename="{}"'
    assert files(part(head.format("Küche ☕.jpg")))[0].name == "Küche ☕.jpg"
    assert len(files(part(head.format(2000 * "x")))[0].name) == 200
    assert files(part('Content-Disposition: form-data; name="pictures"'))[0].name == "picture 1"


def test_places_and_bytes_are_given_back_and_bounded():
    room = Room(Limits(pictures=3, queue=4, heavy=1, body=60, memory=100), lambda: 2.0)
    with room.enter(60) as place:
        place.widen(3)
        assert (room.pictures, room.bytes) == (3, 60)
        with pytest.raises(Refusal) as refusal:
            room.enter(50)  # too many bytes
        assert refusal.value.reason == "memory"
        with room.enter(10, heavy=True) as other:
            assert room.is_full
            for heavy in (False, True):
                with pytest.raises(Refusal) as refusal:
                    room.enter(1, heavy=heavy)
                assert refusal.value.status == 503
                assert refusal.value.headers == {"Retry-After": "2"}  # 4 pictures, 2 a second
            with pytest.raises(Refusal):
                other.widen(2)
        with pytest.raises(Refusal) as refusal, room.enter(1, heavy=True):
            room.enter(1, heavy=True)
        assert (room.pictures, room.bytes, room.heavy) == (3, 60, 0)
    assert (room.pictures, room.bytes, room.heavy) == (0, 0, 0)
