"""Images on their way to an engine: each once, in turns, within the engine's memory."""

import hashlib

import pytest

from services.frontend.engine_client.image_uploads import PART_BYTES, ImageUploads
from services.frontend.engine_client.messages import PlacedImage
from services.frontend.errors import InvalidRequestError


def image(name: str, num_parts: int = 2) -> PlacedImage:
    patches = name.encode() * (num_parts * PART_BYTES // len(name))
    digest = hashlib.sha256(name.encode()).digest()
    return PlacedImage(digest=digest, grid=(2, 3), patches=patches, offset=1, num_tokens=6)


class Uploads(ImageUploads):
    def __init__(self, max_parts: int = 100) -> None:
        self.sent: list[int] = []
        super().__init__(max_bytes=max_parts * PART_BYTES, on_sent=self.sent.append)

    def drain(self) -> list[bytes]:
        """Takes everything to send; returns the digests of the parts."""
        digests = []
        while (part := self.next_part()) is not None:
            digests.append(part.digest)
        return digests


CAT, DOG, OWL = image("cat"), image("dog!"), image("owl")


def test_the_parts_of_an_image_are_its_patches_and_the_last_has_the_grid():
    uploads = Uploads()
    uploads.add(7, [image("x", num_parts=3)])
    parts = [uploads.next_part() for _ in range(3)]
    assert b"".join(part.patches for part in parts) == image("x", num_parts=3).patches
    assert [list(part.grid) for part in parts] == [[], [], [2, 3]]
    assert uploads.sent == []
    assert uploads.next_part() is None
    assert uploads.sent == [7]


def test_requests_take_turns():
    uploads = Uploads()
    uploads.add(1, [CAT, DOG])
    uploads.add(2, [OWL])
    cat, dog, owl = CAT.digest, DOG.digest, OWL.digest
    assert uploads.drain() == [cat, owl, cat, owl, dog, dog]
    assert uploads.sent == [2, 1]


def test_an_image_of_two_requests_travels_once_and_is_dropped_after_both():
    uploads = Uploads()
    uploads.add(1, [CAT, CAT])
    uploads.add(2, [CAT])
    assert uploads.drain() == [CAT.digest] * 2
    assert uploads.sent == [1, 2]
    uploads.release(1)
    assert uploads.take_drops() == []
    uploads.release(2)
    assert uploads.take_drops() == [CAT.digest]
    assert not uploads.has_work


def test_an_image_that_is_named_again_before_its_drop_stays():
    uploads = Uploads()
    uploads.add(1, [CAT])
    uploads.drain()
    uploads.release(1)
    uploads.add(2, [CAT])
    assert uploads.take_drops() == []
    assert uploads.drain() == []
    assert uploads.sent == [1, 2]


def test_an_image_comes_again_after_its_drop():
    uploads = Uploads()
    uploads.add(1, [CAT])
    uploads.drain()
    uploads.release(1)
    uploads.take_drops()
    uploads.add(2, [CAT])
    assert uploads.drain() == [CAT.digest] * 2


def test_an_image_whose_request_ends_halfway_is_sent_and_dropped():
    uploads = Uploads()
    uploads.add(1, [CAT, DOG])
    uploads.next_part()
    uploads.release(1)
    assert uploads.take_drops() == []
    assert uploads.drain() == [CAT.digest]
    assert uploads.take_drops() == [CAT.digest]
    assert uploads.sent == []


def test_an_image_that_another_request_names_goes_on_when_the_first_ends_halfway():
    uploads = Uploads()
    uploads.add(1, [CAT])
    uploads.next_part()
    uploads.release(1)
    uploads.add(2, [CAT])
    assert uploads.drain() == [CAT.digest]
    assert uploads.sent == [2]
    uploads.release(2)
    assert uploads.take_drops() == [CAT.digest]


def test_a_request_that_ends_before_its_first_part_costs_nothing():
    uploads = Uploads()
    uploads.add(1, [CAT])
    uploads.release(1)
    assert uploads.drain() == []
    assert uploads.take_drops() == []


def test_requests_wait_for_room_in_their_order():
    uploads = Uploads(max_parts=4)
    uploads.add(1, [CAT, DOG])
    uploads.add(2, [OWL])
    uploads.add(3, [CAT])
    assert uploads.is_waiting(2)
    assert uploads.is_waiting(3)
    uploads.drain()
    assert uploads.sent == [1]
    uploads.release(1)
    assert set(uploads.take_drops()) == {CAT.digest, DOG.digest}
    assert uploads.drain() == [OWL.digest, CAT.digest] * 2
    assert uploads.sent == [1, 2, 3]


def test_a_request_that_ends_while_it_waits_makes_way():
    uploads = Uploads(max_parts=4)
    uploads.add(1, [CAT])
    uploads.add(2, [DOG, OWL])
    uploads.add(3, [OWL])
    uploads.release(2)
    assert not uploads.is_waiting(3)
    assert set(uploads.drain()) == {CAT.digest, OWL.digest}


def test_images_over_the_engines_memory_are_refused():
    uploads = Uploads(max_parts=3)
    with pytest.raises(InvalidRequestError, match=r"take \d+ bytes of patches"):
        uploads.add(1, [CAT, DOG])
    uploads.release(1)
    assert not uploads.has_work
