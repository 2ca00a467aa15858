"""Images are encoded before their tokens, in bounded numbers, and never taken for another."""

import random

import pytest

from services.engine.batch import read_int32
from services.engine.request import RequestStatus
from services.engine.scheduler.encoder_cache import EncoderCache
from tests.support.fake_images import IMAGE_TOKEN, image_at, meant
from tests.support.fake_worker import VOCAB_SIZE, expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, q_lens
from tests.support.token_masks import ManualConstraint


def prompt_of(*parts):
    """Returns tokens and images of a prompt; a pair is what an image shows, and its vectors."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, list):
            tokens += part
        else:
            images.append(image_at(len(tokens), part[1], part[0]))
            tokens += [IMAGE_TOKEN] * part[1]
    return tokens, images


def ask(*parts, **fields):
    tokens, images = prompt_of(*parts)
    return make_request(tokens, images=images, **fields)


def check(request):
    prompt = meant(request.prompt_token_ids, request.images)
    assert request.sink.token_ids == expected_output(prompt, request.sampling)


def image_rig(**fields):
    sizes = {"num_encoder_pages": 4, "max_encoder_tokens": 64, "max_num_batched_tokens": 64}
    return Rig(num_blocks=65, **sizes | fields)


def shown(step):
    return [each.grid[0] for each in step.descriptor.encoded_images]


def test_requests_that_show_one_image_encode_it_once():
    rig = image_rig()
    first, second = ask([1], (1, 9), [2]), ask([3], (1, 9), [4])
    rig.add(first, second)
    assert shown(rig.send()) == [1]
    rig.run()
    third = ask([5], (1, 9), [6])
    rig.add(third)
    assert shown(rig.send()) == []
    rig.run()
    for request in (first, second, third):
        check(request)
    counts = rig.scheduler.counts
    assert (counts.num_encoded_images, counts.num_found_images) == (1, 2)


def test_a_prefix_with_another_image_is_another_prefix():
    rig = image_rig()
    first = ask([1, 2, 3], (1, 9), list(range(20)))
    rig.add(first)
    rig.run()
    same, other = (ask([1, 2, 3], (number, 9), list(range(20))) for number in (1, 2))
    rig.add(same, other)
    rig.run()
    assert (same.num_cached_tokens, other.num_cached_tokens) == (28, 0)
    for request in (same, other):
        check(request)


def test_a_cached_image_is_not_encoded_again():
    rig = image_rig(num_encoder_pages=1)
    rig.add(ask([1, 2, 3], (1, 9), list(range(20))))
    rig.run()
    rig.add(ask([1], (2, 9), [2]))  # takes the only page
    rig.run()
    again = ask([1, 2, 3], (1, 9), list(range(20)))
    rig.add(again)
    assert shown(rig.send()) == []
    rig.run()
    check(again)


def test_chunks_cut_through_images():
    rig = image_rig(max_num_batched_tokens=5)
    request = ask([1, 2, 3], (1, 17), [4], (2, 9), [5])
    rig.add(request)
    steps = [rig.send() for _ in range(7)]
    assert [shown(step) for step in steps] == [[1], [], [], [], [2], [], []]
    assert [len(step.descriptor.images) for step in steps] == [1, 1, 1, 1, 1, 1, 0]
    rig.run()
    check(request)


def inside(request, end):
    """Whether a position is after the first and before the last token of an image."""
    return any(each.offset < end < each.end for each in request.images)


def whole_rig(**fields):
    return image_rig(**{"max_num_batched_tokens": 24, "max_whole_tokens": 20} | fields)


@pytest.mark.parametrize("seed", range(6))
def test_no_step_ends_inside_of_an_image_that_is_computed_whole(seed):
    order = random.Random(seed)
    rig = whole_rig(max_num_mixed_tokens=6)
    requests = []
    for _ in range(8):
        parts = [order.choices(range(90), k=order.randint(1, 9))]
        for _ in range(order.randint(0, 2)):
            parts += [(order.randint(1, 3), order.randint(1, 15)), [order.randint(0, 90)]]
        requests.append(ask(*parts, max_tokens=order.randint(1, 9)))
    rig.add(*requests)
    while rig.scheduler.has_work:
        rig.step()
        assert not any(inside(each, each.num_computed_tokens) for each in requests)
    for request in requests:
        check(request)


def test_a_whole_image_runs_beside_decodes_whatever_mixed_steps_may_have():
    rig = whole_rig(max_num_mixed_tokens=4)
    decoding = ask([1, 2], max_tokens=30)
    rig.add(decoding)
    rig.step()
    rig.add(ask([3], (1, 17), [4]))
    lengths = [q_lens(rig.send()) for _ in range(3)]
    assert any(len(each) == 2 and max(each) >= 17 for each in lengths)
    rig.run()
    check(decoding)


def test_an_image_that_is_partly_cached_is_computed_to_its_end():
    rig = whole_rig()
    first = ask([1, 2, 3], (1, 18), list(range(9)))
    rig.add(first)
    rig.run()
    second = ask([1, 2, 3], (1, 18), [50, 51])
    rig.add(second)
    step = rig.send()
    assert second.num_cached_tokens == 20
    assert q_lens(step) == [3]
    rig.run()
    check(second)


def test_a_step_encodes_a_bounded_number_of_vectors_and_a_large_image_alone():
    rig = image_rig(max_encoder_tokens=10)
    small, large = ask([1], (1, 6), (2, 6), [1]), ask([2], (3, 20), [1])
    rig.add(small, large)
    first, second, third = rig.send(), rig.send(), rig.send()
    assert [shown(step) for step in (first, second, third)] == [[1], [2], [3]]
    assert q_lens(first) == [7, 1]
    rig.run()
    for request in (small, large):
        check(request)


def short_rig():
    """A scheduler with a request that decodes, and short steps beside it."""
    rig = image_rig(max_num_mixed_tokens=40, num_encoder_pages=16)
    decoding = ask([1, 2], max_tokens=40)
    rig.add(decoding)
    rig.step()
    return rig, decoding


@pytest.mark.parametrize("text", [[3], []], ids=["after text", "first"])
def test_beside_decodes_a_step_encodes_an_image_and_the_next_ones_compute_its_tokens(text):
    rig, decoding = short_rig()
    request = ask(text, (1, 17), [4])
    rig.add(request)
    first, second = rig.send(), rig.send()
    assert (shown(first), sum(q_lens(first))) == ([1], 1 + len(text))
    assert (shown(second), sorted(q_lens(second))) == ([], [1, 18])
    rig.run()
    for each in (decoding, request):
        check(each)
    counts = rig.scheduler.counts
    assert (counts.num_encoded_images, counts.num_found_images) == (1, 0)


def test_requests_that_show_one_image_wait_for_it_together():
    rig, _ = short_rig()
    requests = [ask([3 + number], (1, 9), [4]) for number in range(2)]
    rig.add(*requests)
    first = rig.send()
    assert (shown(first), q_lens(first)) == ([1], [1, 1, 1])
    rig.run()
    for each in requests:
        check(each)
    counts = rig.scheduler.counts
    assert (counts.num_encoded_images, counts.num_found_images) == (1, 1)


def test_a_short_step_encodes_as_many_vectors_as_it_may_have_tokens():
    rig, _ = short_rig()
    rig.add(ask([3], (1, 25), [4]), ask([5], (2, 9), (3, 9), [6]))
    assert [shown(rig.send()) for _ in range(3)] == [[1, 2], [3], []]
    rig.run()


def test_an_image_is_encoded_although_no_request_computes_anything_beside_it():
    rig, decoding = short_rig()
    while len(decoding.token_ids) + decoding.num_pending_tokens < decoding.max_num_tokens:
        rig.send()
    request = ask([], (1, 17), [4])
    rig.add(request)
    step = rig.send()
    assert (shown(step), q_lens(step)) == ([1], [18])
    rig.run()
    check(request)


def test_an_image_does_not_wait_for_the_mask_of_another_request():
    """No result is due, so nothing would have the scheduler plan the next step."""
    rig = image_rig(max_num_mixed_tokens=40)
    waiting, running = make_request(3), ask([5] * 20, (1, 17), [4])
    waiting.constraint = ManualConstraint(
        lambda _: range(500), vocab_size=VOCAB_SIZE, is_instant=False
    )
    rig.add(waiting)
    rig.step()
    assert waiting.awaits_mask
    rig.add(running)
    steps = [rig.step() for _ in range(2)]
    assert [each.request for outputs in steps for each in outputs] == [running]
    later = ask([], (2, 17), [4], max_tokens=1)
    while running.status is RequestStatus.RUNNING:
        rig.step()
    rig.add(later)
    rig.step()
    for each in (running, later):
        check(each)


def test_a_request_waits_for_pages_that_another_one_needs():
    rig = image_rig(num_encoder_pages=2, max_num_batched_tokens=8)
    first, second = ask([1], (1, 30), [2]), ask([3], (2, 30), [4])
    rig.add(first, second)
    rig.run()
    for request in (first, second):
        check(request)


def test_steps_with_images_run_no_graph_of_decodes():
    rig = image_rig(max_num_batched_tokens=1)
    request = ask([1], (1, 2), [2, 3])
    rig.add(request)
    steps = [rig.send() for _ in range(4)]
    assert [step.sees_images for step in steps] == [True, True, True, False]
    rig.run()
    check(request)


def test_an_aborted_request_leaves_its_pages():
    rig = image_rig(num_encoder_pages=2, max_num_batched_tokens=8)
    first, second = ask([1], (1, 30), [2]), ask([3], (2, 30), [4])
    rig.add(first)
    rig.send()
    rig.scheduler.abort(first)
    rig.add(second)
    rig.run()
    check(second)


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_see_their_own_images(seed):
    """Few prompts and pages: images come back, are evicted, are cut and meet on equal prefixes."""
    draw = random.Random(seed)
    rig = image_rig(
        num_encoder_pages=draw.choice([2, 3, 5]),
        max_encoder_tokens=draw.choice([1, 20, 64]),
        max_num_batched_tokens=draw.choice([3, 7, 20, 64]),
        max_num_seqs=draw.choice([1, 3, 6]),
        max_num_mixed_tokens=draw.choice([None, 1, 16]),
    )
    requests = []
    for _ in range(60):
        parts = []
        for _ in range(draw.choice([1, 1, 2])):
            parts += [list(range(draw.choice([1, 3, 4]))), (draw.choice([1, 2]), 9)]
        parts[1] = (draw.choice([1, 2, 3]), draw.choice([9, 9, 17]))
        request = ask(*parts, list(range(draw.choice([0, 4, 9]))), max_tokens=draw.choice([1, 5]))
        if rig.scheduler.num_waiting < 8:
            rig.add(request)
            requests.append(request)
        for _ in range(draw.choice([0, 0, 1, 3])):
            step = rig.scheduler.schedule() if len(rig.in_flight) < 3 else None
            if step is not None:
                rig.in_flight.append(step)
            elif rig.in_flight:
                rig.receive()
    rig.run()
    for request in requests:
        check(request)
    assert rig.scheduler.num_free_blocks == 64


def test_pages_come_back_and_the_image_used_longest_ago_goes_first():
    cache = EncoderCache(3)
    pages = {name: cache.take(name, 16) for name in (b"a", b"b", b"c")}
    assert sorted(page for each in pages.values() for page in each) == [0, 1, 2]
    assert cache.take(b"d", 1) is None
    cache.release(b"b")
    cache.release(b"a")
    assert cache.find(b"b") == pages[b"b"]
    assert cache.take(b"d", 17) is None
    assert cache.take(b"d", 16) == pages[b"a"]
    assert cache.find(b"a") is None


def test_step_messages_carry_patches_once():
    rig = image_rig(max_num_batched_tokens=5)
    rig.add(ask([1, 2, 3], (1, 17), [4]))
    step = rig.send()
    [encoded] = step.descriptor.encoded_images
    assert (encoded.patches, tuple(encoded.grid)) == (bytes([1]) * 17, (1, 17))
    assert len(read_int32(encoded.pages)) == 2
    [assignment] = step.descriptor.row_assignments
    assert [(each.offset, each.num_tokens) for each in assignment.images] == [(3, 17)]


def test_a_request_does_not_wait_for_the_prefix_of_another_image():
    rig = image_rig(max_num_batched_tokens=20)
    requests = [ask([1], (number, 9), [2] * 8) for number in (1, 2, 1)]
    rig.add(*requests)
    assert q_lens(rig.send()) == [18, 2]
    rig.run()
    for request in requests:
        check(request)
