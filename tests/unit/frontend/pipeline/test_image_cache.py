"""Images that were read lately."""

from services.frontend.images.processor import ProcessedImage
from services.frontend.pipeline.image_cache import ImageCache


def image(num_bytes: int) -> ProcessedImage:
    return ProcessedImage(b"d" * 32, (1, 1), bytes(num_bytes), (7,))


def test_the_least_recently_used_image_goes_first():
    cache = ImageCache(10)
    for name in "ab":
        cache.put(name, image(4))
    assert cache.get("a") is not None
    cache.put("c", image(4))
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]


def test_an_image_over_the_limit_drives_no_other_out():
    cache = ImageCache(10)
    cache.put("a", image(4))
    cache.put("b", image(11))
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_an_image_that_is_put_again_counts_once():
    cache = ImageCache(10)
    for name in "aab":
        cache.put(name, image(5))
    assert cache.get("a") is not None
    assert cache.get("b") is not None
