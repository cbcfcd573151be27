from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import BOUNDARY, form_body

from vitrail.serving import limits
from vitrail.serving.config import ServerConfig
from vitrail.serving.limits import AdmissionController, ApiError, RequestRecord, parse_form

TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def files(body, kind=TYPE):
    return parse_form(kind, body, 8)


def part(head, data=b"x"):
    start, end = f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode(), f"\r\n--{BOUNDARY}--\r\n".encode()
    return start + data + end


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_form_round_trip(images):
    uploads = files(form_body(images))
    assert [upload.data for upload in uploads] == images
    assert [upload.name for upload in uploads] == [f"{n}.jpg" for n in range(len(images))]


@given(st.binary(max_size=200), st.integers(0, 400), st.binary(min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_garbage_is_rejected_and_a_corrupted_form_parsed_or_rejected(garbage, place, noise):
    with pytest.raises(ApiError) as caught:
        files(garbage)
    assert caught.value.status == 400
    body = form_body([b"first", b"second"])
    place %= len(body)
    with suppress(ApiError):
        files(body[:place] + noise + body[place + len(noise) :])


@pytest.mark.parametrize(
    ("body", "kind", "expected_text"),
    [
        (form_body([b"x"]), "multipart/form-data", "no boundary"),
        (form_body([b"x"])[:-10], TYPE, "truncated"),
        (part("Content-Type: image/png"), TYPE, "no Content-Disposition header"),
        (f"--{BOUNDARY}\r\nno end".encode(), TYPE, "has no headers"),
        (b"", TYPE, "truncated"),
        (part("X: " + 5000 * "x"), TYPE, "has no headers"),
    ],
)
def test_invalid_form_is_a_one_line_error(body, kind, expected_text):
    with pytest.raises(ApiError, match=expected_text) as caught:
        files(body, kind)
    assert caught.value.status == 400


def test_images_fields_and_file_names_are_limited():
    assert files(form_body([b"x"], field="comment")) == []
    with pytest.raises(ApiError, match="more than 16 other fields"):
        files(form_body([b"x"] * 17, field="comment"))
    assert len(files(form_body([b"x"] * 8))) == 8
    with pytest.raises(ApiError, match="more than 8 images") as caught:
        files(form_body([b"x"] * 9))
    assert caught.value.status == 413
    head = 'content-disposition: form-data; name="pictures"; filename="{}"'
    assert files(part(head.format("Küche ☕.jpg")))[0].name == "Küche ☕.jpg"
    assert len(files(part(head.format(2000 * "x")))[0].name) == 200
    assert files(part('Content-Disposition: form-data; name="pictures"'))[0].name == "picture 1"


def test_reservations_are_bounded_and_released(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HEAVY", 1)
    monkeypatch.setattr(limits, "MAX_MEMORY", 100)
    admission = AdmissionController(ServerConfig(max_images=3, queue=4), lambda: 2.0)
    first, second, third = (RequestRecord(str(n), "POST") for n in range(3))
    admission.reserve(first, 60)
    admission.reserve_images(first, 3)
    assert (admission.images, admission.bytes) == (3, 60)
    with pytest.raises(ApiError) as error:
        admission.reserve(second, 50)  # too many bytes
    assert error.value.reason == "memory"
    admission.reserve(second, 10, heavy=True)
    assert admission.images == 4
    for heavy in (False, True):
        with pytest.raises(ApiError) as error:
            admission.reserve(third, 1, heavy=heavy)
        assert error.value.status == 503
        assert error.value.headers == {"Retry-After": "2"}  # 4 images, 2 per second
    with pytest.raises(ApiError):
        admission.reserve_images(second, 2)
    admission.release(second)
    admission.release(second)  # releasing twice changes nothing
    assert (admission.images, admission.bytes, admission.heavy) == (3, 60, 0)
    admission.release(first)
    assert (admission.images, admission.bytes, admission.heavy) == (0, 0, 0)
