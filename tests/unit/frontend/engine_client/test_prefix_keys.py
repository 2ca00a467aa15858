"""Prefix keys of prompts with images, as docs/protocol.md defines them."""

import hashlib
import struct

from services.frontend.engine_client.messages import PlacedImage, pack_uint32
from services.frontend.engine_client.prefix_keys import compact_keys

TOKENS = list(range(100, 116))
PACKED = pack_uint32(TOKENS)


def image(offset: int, num_tokens: int, digest: bytes = b"d" * 32) -> PlacedImage:
    return PlacedImage(
        digest=digest, grid=(1, 1), patches=b"p", offset=offset, num_tokens=num_tokens
    )


def keys(*images: PlacedImage) -> list[int]:
    return compact_keys("", PACKED, 4, max_blocks=100, images=images)


def test_an_image_counts_in_the_block_of_its_first_token():
    key = hashlib.blake2b(bytes(4), digest_size=32, person=b"octavo2.root").digest()
    expected = []
    images = {
        1: struct.pack("<II", 1, 2) + b"a" * 32 + struct.pack("<II", 3, 6) + b"b" * 32,
    }
    for block in range(4):
        data = key + PACKED[16 * block : 16 * block + 16] + images.get(block, b"")
        key = hashlib.blake2b(data, digest_size=32, person=b"octavo2.block").digest()
        expected.append(int.from_bytes(key[:8], "little"))
    assert keys(image(5, 2, b"a" * 32), image(7, 6, b"b" * 32)) == expected


def test_blocks_before_an_image_have_the_keys_of_text():
    with_image, without = keys(image(9, 3)), keys()
    assert with_image[:2] == without[:2]
    assert not {*with_image[2:]} & {*without[2:]}


def test_other_pictures_places_and_sizes_have_other_keys():
    found = [
        keys(image(5, 3)),
        keys(image(5, 4)),
        keys(image(6, 3)),
        keys(image(5, 3, b"e" * 32)),
    ]
    assert len({each[-1] for each in found}) == len(found)
