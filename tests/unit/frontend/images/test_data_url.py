"""Images in data URLs."""

import base64

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.images.media.data_url import from_data_url, is_data_url
from tests.support.media_network import IMAGE


@pytest.mark.parametrize(
    "prefix",
    [
        "data:image/png;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:image/svg+xml;charset=utf-8;base64,",
        "data:image/png;name=a.png;base64,",
    ],
)
def test_data_urls_have_the_bytes_of_an_image(prefix):
    url = prefix + base64.b64encode(IMAGE).decode()
    assert is_data_url(url)
    assert from_data_url(url, max_bytes=len(IMAGE)) == IMAGE


def test_line_ends_in_base64_are_left_out():
    text = base64.encodebytes(bytes(200)).decode()
    assert from_data_url(f"data:image/png;base64,{text}", max_bytes=200) == bytes(200)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:", "is not data:image"),
        ("data:image/png;base64", "is not data:image"),
        ("data:image/png" + ";a=b" * 9999 + ";base64,AAAA", "is not data:image"),
        ("data:,AAAA", "'text/plain' instead of an image"),
        ("data:text/html;base64,AAAA", "'text/html' instead of an image"),
        ("data:video/mp4;base64,AAAA", "'video/mp4' instead of an image"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64,AAA", "no valid base64"),
        ("data:image/png;base64,A*AA", "no valid base64"),
        ("data:image/png;base64,AA==AAAA", "no valid base64"),
        ("data:image/png;base64,ÄAAA", "no valid base64"),
        ("data:image/png;base64," + "AAAA" * 1000, "over 99 bytes"),
        ("data:image/png;base64," + "AAAA" * 33 + "AA==", "over 99 bytes"),
    ],
)
def test_other_data_urls_are_refused(url, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        from_data_url(url, max_bytes=99)
