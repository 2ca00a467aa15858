"""Patches are where the service put them, and room is used again once it is free."""

import gc
import mmap
import os
import queue
import random
import sys
import threading

import pytest

from services.engine.patch_memory import WARM_BYTES, PatchMemory
from services.engine.prompt_image import EncoderImage

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory():
    return PatchMemory.create(8 * PAGE)


def image_in(memory, *parts):
    return EncoderImage.joined(parts, digest=bytes(32), grid=(1,), memory=memory)


def test_a_worker_reads_what_the_service_wrote(memory):
    worker = PatchMemory(os.dup(memory.fd))
    begin = memory.put([b"12", b"345"])
    assert bytes(worker.read(begin, 5)) == b"12345"


def test_places_do_not_overlap_and_the_lowest_free_one_is_next(memory):
    places = [memory.put([b"x" * size]) for size in (1, PAGE + 1, PAGE)]
    assert places == [0, PAGE, 3 * PAGE]
    memory.free(PAGE)
    assert memory.put([b"y" * 3 * PAGE]) == 4 * PAGE
    assert memory.put([b"y" * 2 * PAGE]) == PAGE
    assert bytes(memory.read(0, 1)) == b"x"
    assert bytes(memory.read(3 * PAGE, PAGE)) == b"x" * PAGE


def test_an_image_without_room_stays_with_the_service(memory):
    first, second = image_in(memory, b"x" * 8 * PAGE), image_in(memory, b"12", b"3")
    assert (first.place, second.place, second.patches) == (0, None, b"123")


def test_the_place_of_an_image_is_freed_with_it(memory):
    for _ in range(3):
        image = image_in(memory, b"x" * 5 * PAGE)
        assert (image.place, bytes(image.patches)) == (0, b"x" * 5 * PAGE)
        del image
        gc.collect()


def test_memory_beyond_what_stays_warm_goes_back_to_the_system():
    memory = PatchMemory.create(2 * WARM_BYTES)
    image = image_in(memory, b"x" * (WARM_BYTES + 9 * PAGE))
    assert os.fstat(memory.fd).st_blocks * 512 >= WARM_BYTES + 9 * PAGE
    del image
    assert os.fstat(memory.fd).st_blocks * 512 <= WARM_BYTES


def test_images_that_another_thread_frees_leave_no_place_to_two():
    """Collections of garbage end images in any thread."""
    memory, freed = PatchMemory.create(9000 * PAGE), queue.SimpleQueue()

    def free_all():
        while (begin := freed.get()) is not None:
            memory.free(begin)

    draw, interval = random.Random(0), sys.getswitchinterval()
    thread = threading.Thread(target=free_all)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        taken = {}
        for _ in range(3000):
            size = draw.choice([1, 2, 3])
            begin = memory.put([b"x" * size * PAGE])
            assert begin is not None
            pages = set(range(begin // PAGE, begin // PAGE + size))
            assert pages.isdisjoint(page for each in taken.values() for page in each)
            taken[begin] = pages
            if len(taken) > 30:
                oldest = draw.choice(list(taken))
                del taken[oldest]
                freed.put(oldest)
    finally:
        sys.setswitchinterval(interval)
        freed.put(None)
        thread.join()


def test_workers_cannot_change_the_size_of_memory(memory):
    for size in (0, 16 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


@pytest.mark.parametrize("place", [(-1, 1), (8 * PAGE, 1), (0, 8 * PAGE + 1)])
def test_places_outside_are_refused(memory, place):
    with pytest.raises(ValueError, match="bytes"):
        memory.read(*place)
