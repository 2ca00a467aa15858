"""Images come in parts, are held within a limit, and belong to tokens of prompts."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from protos.engine.v1.engine_pb2 import DropImages, Image, ImagePart
from services.engine.edge.prompt_images import read_images
from services.engine.edge.session_images import MAX_PART_BYTES, SessionImages
from services.engine.errors import InvalidRequestError

DIGEST, OTHER = b"\1" * 32, b"\2" * 32
TOKEN = 9


def part(patches=b"", grid=(), digest=DIGEST):
    return ImagePart(digest=digest, patches=patches, grid=grid)


def held(*digests):
    images = SessionImages(max_bytes=1000)
    for digest in digests:
        images.add(part(b"1234", (2, 2), digest))
    return images


def image_input(*, has_mrope=False):
    return SimpleNamespace(
        token_id=TOKEN, has_mrope=has_mrope, num_vectors=lambda grid: grid[0] * grid[1] // 2
    )


def read(prompt, *images, holds=(DIGEST, OTHER), model=None):
    tokens = np.array(prompt, np.uint32)
    return read_images(images, held(*holds), tokens, model or image_input())


def place(offset, num_tokens, digest=DIGEST):
    return Image(digest=digest, offset=offset, num_tokens=num_tokens)


def test_parts_become_an_image_even_between_parts_of_others():
    images = SessionImages(max_bytes=1000)
    images.add(part(b"12"))
    images.add(part(b"ab", digest=OTHER))
    images.add(part(b"34", (2, 2)))
    images.add(part(b"", (1, 2), OTHER))
    assert (images.find(DIGEST).patches, images.find(DIGEST).grid) == (b"1234", (2, 2))
    assert (images.find(OTHER).patches, images.find(OTHER).grid) == (b"ab", (1, 2))


def test_images_end_with_their_session():
    images = held(DIGEST)
    image, images = weakref.ref(images.find(DIGEST)), None
    gc.collect()
    assert image() is None


def test_dropped_images_make_room_and_are_forgotten():
    images = SessionImages(max_bytes=8)
    images.add(part(b"1234", (2, 2)))
    images.add(part(b"ab", digest=OTHER))
    with pytest.raises(InvalidRequestError, match="more than 8 bytes"):
        images.add(part(b"xyz", digest=OTHER))
    images = SessionImages(max_bytes=8)
    for _ in range(100):
        images.add(part(b"1234", (2, 2)))
        images.add(part(b"ab", digest=OTHER))
        images.drop(DropImages(digests=[DIGEST, OTHER, b"unknown"]))
    with pytest.raises(InvalidRequestError, match="was not sent on this session"):
        images.find(DIGEST)


def test_a_dropped_image_counts_as_long_as_a_request_has_it():
    images, kept = SessionImages(max_bytes=4), []
    for number in range(2):
        images.add(part(b"1234", (2, 2), bytes([number]) * 32))
        kept.append(images.find(bytes([number]) * 32))
        images.drop(DropImages(digests=[bytes([number]) * 32]))
    with pytest.raises(InvalidRequestError, match="more than 4 bytes"):
        images.add(part(b"1", digest=OTHER))
    kept.pop()
    images.add(part(b"5678", (2, 2), OTHER))
    assert images.find(OTHER).patches == b"5678"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (part(b"1", (1,), b"short"), "digest has 5 bytes"),
        (part(b"1" * (MAX_PART_BYTES + 1)), "limits are"),
        (part(b"1", range(1, 10)), "a grid of 9 numbers"),
        (part(), "empty and not the last"),
    ],
)
def test_broken_parts_are_refused(wrong, message):
    with pytest.raises(InvalidRequestError, match=message):
        SessionImages(max_bytes=2**20).add(wrong)


def test_an_image_is_sent_once_and_only_to_models_that_see():
    with pytest.raises(InvalidRequestError, match="that the session holds"):
        held(DIGEST).add(part(b"1"))
    with pytest.raises(InvalidRequestError, match="models that see"):
        SessionImages(max_bytes=0).add(part(b"1", (1, 1)))


def test_images_have_their_tokens():
    prompt = [1, TOKEN, TOKEN, 2, TOKEN, 7, TOKEN, 3]
    first, second = read(prompt, place(1, 2), place(4, 3, OTHER))
    assert (first.offset, first.end, first.num_vectors) == (1, 3, 2)
    assert (second.image.digest, second.num_tokens, second.num_vectors) == (OTHER, 3, 2)


@pytest.mark.parametrize(
    "places",
    [
        [place(1, 3)],
        [place(0, 2)],
        [place(1, 2), place(2, 2)],
        [place(4, 2), place(1, 2)],
        [place(1, 0)],
        [place(7, 2)],
        [place(2**32 - 1, 2)],
    ],
    ids=["two few", "one off", "overlap", "order", "empty", "beyond", "far"],
)
def test_images_elsewhere_are_refused(places):
    with pytest.raises(InvalidRequestError):
        read([1, TOKEN, TOKEN, 2, TOKEN, TOKEN, 4, 5], *places, model=image_input(has_mrope=True))


def test_rows_and_columns_need_neighbouring_tokens():
    prompt = [1, TOKEN, 5, TOKEN, 2]
    assert read(prompt, place(1, 3))
    with pytest.raises(InvalidRequestError, match="2 image tokens of 3"):
        read(prompt, place(1, 3), model=image_input(has_mrope=True))


def test_a_model_that_sees_nothing_says_so():
    with pytest.raises(InvalidRequestError, match="sees no images"):
        read_images([place(1, 2)], held(DIGEST), np.array([1, 9, 9], np.uint32), None)
    assert read_images([], held(), np.array([1], np.uint32), None) == ()
