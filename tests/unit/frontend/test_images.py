"""Images over gRPC: what the engine gets, once a session, and what is refused."""

from unittest import mock

import grpc
import numpy as np
import pytest

from protos.engine.v1.engine_pb2 import PrefixChanges
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.engine_client import session
from services.frontend.engine_client.messages import PlacedImage, pack_uint32
from services.frontend.engine_client.prefix_keys import compact_keys
from services.frontend.pipeline.image_reading import ImageParts
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.vision import (
    BREAK_ID,
    BREAK_TOKEN,
    IMAGE_ID,
    IMAGE_TOKEN,
    PATCH_BYTES,
    TEMPLATE,
    png,
    prompt,
    seen,
    shown,
    vision_engine,
    vision_stack,
)
from tests.support.waiting import until

CAT, DOG = png(48, 32), png(32, 64, colour=9)
BIG = png(1024, 1024)
"""3 MiB of patches."""


def part(value: bytes | str) -> pb.ContentPart:
    if isinstance(value, str):
        return pb.ContentPart(text=value)
    return pb.ContentPart(image=value)


def user(*values: bytes | str, role: str = "user") -> pb.ChatMessage:
    return pb.ChatMessage(role=role, parts=[part(value) for value in values])


def chat(*messages: pb.ChatMessage, **options: object) -> pb.ChatRequest:
    return pb.ChatRequest(messages=messages, options=pb.GenerationOptions(**options))


async def answer(call) -> str:
    return "".join([part.output.text async for part in call])


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(call)
    return caught.value


async def test_an_image_may_have_a_token_of_the_template_and_text_around():
    template = TEMPLATE.replace(IMAGE_TOKEN, BREAK_TOKEN)
    place = {"template_token_id": BREAK_ID, "text_around": "\n\n"}
    engine = vision_engine(template=template, place=place)
    async with vision_stack(engine) as (engine, stack, _):
        await answer(stack.stub.Chat(chat(user("a\n", CAT, BREAK_TOKEN))))
    assert shown(engine) == prompt(("user", f"a\n(\n\n<2x3>\n\n){BREAK_TOKEN}"))


async def test_the_engine_gets_images_before_the_prompt_that_names_them():
    async with vision_stack() as (engine, stack, _):
        engine.pause()
        call = stack.stub.Chat(chat(user("What is ", CAT, " and ", DOG, "?")))
        await until(lambda: engine.submits)
        assert engine.images == {
            image.digest: (list(image.grid), image.patches) for image in (seen(CAT), seen(DOG))
        }
        engine.resume()
        assert await answer(call) == "a cat"
        assert shown(engine) == prompt(("user", "What is (<2x3>) and (<4x2>)?"))
        digests = [image.digest for image in engine.submits[0].images]
        assert digests == [seen(CAT).digest, seen(DOG).digest]
        await until(lambda: not engine.images)


async def test_large_images_come_in_parts_between_other_requests():
    album = [png(1024, 1024, colour=colour) for colour in range(8)]
    engine = vision_engine(part_s=0.01, max_image_bytes=2**25, max_model_len=2**16)
    async with vision_stack(engine) as (_, stack, _):
        big = stack.stub.Chat(chat(user(*album), request_id="big"))
        await until(lambda: engine.heard)
        assert await answer(stack.stub.Chat(chat(user("hi"), request_id="small"))) == "a cat"
        assert engine.submits[-1].request_id == "small"
        assert await answer(big) == "a cat"
    parts = [digest for kind, digest in engine.heard if kind == "part"]
    assert parts == [seen(each).digest for each in album for _ in range(12)]


async def test_requests_share_an_image_until_the_last_of_them_ends():
    async with vision_stack() as (engine, stack, reader):
        engine.pause()
        calls = [stack.stub.Chat(chat(user(CAT, word), request_id=word)) for word in "ab"]
        await until(lambda: len(engine.submits) == 2)
        calls[0].cancel()
        await until(lambda: engine.aborted == ["a"])
        assert list(engine.images) == [seen(CAT).digest]
        engine.resume()
        assert await answer(calls[1]) == "a cat"
        await until(lambda: not engine.images)
        kinds = [kind for kind, _ in engine.heard]
        assert kinds.count("part") == kinds.count("drop") == 1
        assert await answer(stack.stub.Chat(chat(user(CAT)))) == "a cat"
    assert len(reader.asked) == 1, "an image that was read lately is not read again"


async def test_a_request_goes_where_its_picture_is_cached():
    cat, dog = png(480, 320), png(480, 320, colour=9)
    cold, warm = vision_engine(engine_id="one"), vision_engine(engine_id="two")
    async with warm, vision_stack(cold, warm) as (_, stack, _):
        conversation = pb.Conversation(messages=[user(cat)])
        told = await stack.stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
        ids, image = list(told.token_ids), seen(cat)
        placed = PlacedImage(
            digest=image.digest,
            grid=image.grid,
            patches=image.patches,
            offset=ids.index(image.tokens[0]),
            num_tokens=len(image.tokens),
        )
        keys = compact_keys("", pack_uint32(ids), 4, max_blocks=1000, images=[placed])
        warm.prefixes = PrefixChanges(reset=True, added=np.array(keys, "<u8").tobytes())
        view = stack.server.engine.engines[1].view
        await until(lambda: view.num_known_prefixes == len(keys))
        await answer(stack.stub.Chat(chat(user(cat))))
        assert (len(cold.submits), len(warm.submits)) == (0, 1)
        await until(lambda: view.num_recent_tokens == len(ids))
        await answer(stack.stub.Chat(chat(user(dog))))
        assert (len(cold.submits), len(warm.submits)) == (1, 1)


async def test_another_engine_gets_the_images_again():
    first, second = vision_engine(engine_id="one"), vision_engine(engine_id="two")
    second.load = {"num_used_blocks": 50}
    async with second, vision_stack(first, second) as (_, stack, _):
        view = stack.server.engine.engines[1].view
        await until(lambda: view.heartbeat.num_used_blocks == 50)
        first.hold_at = 1
        call = stack.stub.Chat(chat(user("What is ", CAT, "?")))
        outputs = [(await call.read()).output]
        await first.die()
        while (response := await call.read()) is not grpc.aio.EOF:
            outputs.append(response.output)
        assert "".join(output.text for output in outputs) == "a cat"
        assert second.submits[0].images == first.submits[0].images
        assert second.submits[0].num_resumed_tokens == 1
        assert ("part", seen(CAT).digest) in second.heard


async def test_an_engine_that_is_lost_amid_an_image_is_replaced():
    first, second = vision_engine(engine_id="one", part_s=60), vision_engine(engine_id="two")
    second.load = {"num_used_blocks": 5000}
    async with second, vision_stack(first, second) as (_, stack, _):
        view = stack.server.engine.engines[1].view
        await until(lambda: view.heartbeat.num_used_blocks == 5000)
        call = stack.stub.Chat(chat(user(BIG)))
        await until(lambda: first.heard)
        await first.die()
        assert await answer(call) == "a cat"
    assert not first.submits
    assert second.submits[0].images[0].digest == seen(BIG).digest


async def test_requests_wait_for_the_engines_memory():
    size = len(seen(BIG).patches)
    async with vision_stack(vision_engine(max_image_bytes=size)) as (engine, stack, _):
        engine.pause()
        first = stack.stub.Chat(chat(user(BIG), request_id="first"))
        await until(lambda: engine.submits)
        second = stack.stub.Chat(chat(user(CAT), request_id="second"))
        late = stack.stub.Chat(chat(user(CAT)), timeout=0.2)
        assert (await refusal(late)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(engine.submits) == 1
        engine.resume()
        assert await answer(first) == await answer(second) == "a cat"


async def test_a_request_does_not_wait_for_the_engines_memory_forever():
    size = len(seen(BIG).patches)
    async with vision_stack(vision_engine(max_image_bytes=size)) as (engine, stack, _):
        engine.pause()
        first = stack.stub.Chat(chat(user(BIG)))
        await until(lambda: engine.submits)
        with mock.patch.object(session, "IMAGE_WAIT_S", 0.05):
            error = await refusal(stack.stub.Chat(chat(user(CAT))))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the engine's memory for images is full" in error.details()
        engine.resume()
        assert await answer(first) == "a cat"


async def test_images_over_the_engines_memory_are_refused():
    size = len(seen(CAT).patches)
    async with vision_stack(vision_engine(max_image_bytes=size)) as (engine, stack, _):
        error = await refusal(stack.stub.Chat(chat(user(CAT, DOG))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"the engine holds at most {size}" in error.details()
        assert not engine.heard
        assert await answer(stack.stub.Chat(chat(user(CAT)))) == "a cat"


async def test_a_request_that_leaves_while_it_waits_never_reaches_the_engine():
    size = len(seen(BIG).patches)
    async with vision_stack(vision_engine(max_image_bytes=size)) as (engine, stack, _):
        engine.pause()
        first = stack.stub.Chat(chat(user(BIG)))
        await until(lambda: engine.submits)
        second = stack.stub.Chat(chat(user(CAT), request_id="gone"))
        await until(lambda: stack.server.engine.engines[0].num_live == 2)
        second.cancel()
        await until(lambda: stack.server.engine.engines[0].num_live == 1)
        engine.resume()
        assert await answer(first) == "a cat"
        assert len(engine.submits) == 1


@pytest.mark.parametrize("is_special", [True, False])
async def test_the_image_token_in_a_text_is_text(is_special):
    spelled = f"Is {IMAGE_TOKEN} this? "
    async with vision_stack(vision_engine(is_special=is_special)) as (engine, stack, _):
        assert await answer(stack.stub.Chat(chat(user(spelled, CAT)))) == "a cat"
        assert shown(engine) == prompt(("user", f"{spelled}(<2x3>)"))
        assert await answer(stack.stub.Chat(chat(user(spelled)))) == "a cat"
        assert not engine.submits[-1].images
        for values in ((spelled, CAT), (spelled,)):
            error = await refusal(stack.stub.Chat(chat(user(*values), parse_special_tokens=True)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "image token" in error.details()


async def test_tokens_of_images_are_counted():
    conversation = pb.Conversation(messages=[user("What is ", CAT, "?")])
    async with vision_stack() as (engine, stack, _):
        told = await stack.stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
        await answer(stack.stub.Chat(chat(user("What is ", CAT, "?"))))
    assert list(told.token_ids).count(IMAGE_ID) == 6
    assert len(told.token_ids) == len(engine.submits[0].prompt_token_ids) // 4


async def test_a_cut_prompt_has_whole_images_alone():
    async with vision_stack() as (engine, stack, _):

        async def cut(num_tokens: int) -> str:
            request = chat(user(CAT, "then", DOG), truncate_prompt_tokens=num_tokens)
            await answer(stack.stub.Chat(request))
            return shown(engine)

        whole = prompt(("user", "(<2x3>)then(<4x2>)"))
        assert await cut(1000) == whole
        num_tokens = len(engine.submits[-1].prompt_token_ids) // 4
        image = engine.submits[-1].images[0]
        end = image.offset + image.num_tokens
        assert await cut(num_tokens - image.offset) == whole[whole.index("<2x3>") :]
        for num_left in (num_tokens - image.offset - 1, num_tokens - end):
            assert await cut(num_left) == whole[whole.index(")then") :]
            [left] = engine.submits[-1].images
            assert left.digest == seen(DOG).digest


async def test_images_that_leave_no_room_are_refused():
    async with vision_stack(vision_engine(max_model_len=100)) as (engine, stack, _):
        error = await refusal(stack.stub.Chat(chat(user(png(320, 320)))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "the prompt is too long: 4" in error.details()
        assert not engine.heard


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (user("hi", CAT, role="system"), "a message of 'system' has an image"),
        (user("hi", CAT, role="assistant"), "a message of 'assistant' has an image"),
        (user(*[CAT] * 3), "there are 3 images; the limit is 2"),
        (user(b"GIF"), "a file that is no known image is not supported"),
        (user(png(2000, 1000), png(1000, 1001)), "the images have 3001000 pixels"),
        (pb.ChatMessage(role="user", content="a", parts=[part("b")]), "content and parts"),
        (pb.ChatMessage(role="user", parts=[pb.ContentPart()]), "a part of a message is empty"),
        (
            pb.ChatMessage(role="user", parts=[pb.ContentPart(image_url="https://a/b.png")]),
            "images are not fetched from URLs here",
        ),
    ],
)
async def test_wrong_images_are_refused(message, told):
    limits = {"max_images_per_request": 2, "max_pixels_per_request": 3_000_000}
    async with vision_stack(**limits) as (engine, stack, _):
        error = await refusal(stack.stub.Chat(chat(message)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert told in error.details()
        assert not engine.heard


async def test_a_model_without_eyes_says_so():
    engine = FakeEngine()
    async with vision_stack(engine) as (_, stack, _):
        error = await refusal(stack.stub.Chat(chat(user(CAT))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "the model 'fake' takes text: it sees no images" in error.details()


async def test_a_template_without_images_says_so():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with vision_stack(vision_engine(template=template)) as (_, stack, _):
        error = await refusal(stack.stub.Chat(chat(user(CAT))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "takes no images in messages of 'user'" in error.details()


async def test_settings_that_cannot_be_followed_leave_the_text():
    def refuse(info: object) -> None:
        raise ValueError("there is no such processor")

    parts = ImageParts(open_reader=refuse)
    async with vision_engine() as engine, frontend_stack(engine, images=parts) as stack:
        assert await answer(stack.stub.Chat(chat(user("hi")))) == "a cat"
        error = await refusal(stack.stub.Chat(chat(user(CAT))))
        assert "cannot be read here: there is no such processor" in error.details()


async def test_urls_are_fetched_by_the_fetcher():
    class Fetcher:
        async def fetch(self, url: str) -> bytes:
            assert url == "https://pictures.test/cat.png"
            return CAT

    message = pb.ChatMessage(
        role="user", parts=[pb.ContentPart(image_url="https://pictures.test/cat.png")]
    )
    async with vision_stack(fetcher=Fetcher()) as (engine, stack, _):
        assert await answer(stack.stub.Chat(chat(message))) == "a cat"
        assert shown(engine) == prompt(("user", "(<2x3>)"))


async def test_memory_of_images_is_counted_until_the_request_ends():
    held = len(CAT) + len(seen(CAT).patches)
    async with vision_stack(max_image_memory_bytes=4 * held) as (engine, stack, _):
        engine.pause()
        first = stack.stub.Chat(chat(user(CAT)))
        await until(lambda: engine.submits)
        error = await refusal(stack.stub.Chat(chat(user(CAT))))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "your images of unfinished requests" in error.details()
        engine.resume()
        assert await answer(first) == "a cat"
        assert await answer(stack.stub.Chat(chat(user(CAT)))) == "a cat"


async def test_a_session_takes_images():
    async with vision_stack() as (engine, stack, _):
        call = stack.stub.Session()
        await call.write(pb.SessionRequest(handle=1, chat=chat(user(CAT))))
        text = ""
        while not (output := (await call.read()).output).finish_reason:
            text += output.text
        await call.done_writing()
        assert shown(engine) == prompt(("user", "(<2x3>)"))


async def test_images_are_counted_in_metrics():
    async with vision_stack() as (_, stack, _):
        await answer(stack.stub.Chat(chat(user(CAT))))
        await answer(stack.stub.Chat(chat(user(CAT))))
        await refusal(stack.stub.Chat(chat(user(b"GIF"))))
        counts = stack.server.requests.counts.images
        assert (counts.num_read, counts.num_cached) == (1, 1)
        assert counts.refused == {"unread": 1}
        assert sum(counts.read.counts) == 1
        num_bytes = stack.server.engine.counts.num_image_bytes
        assert num_bytes in (6 * PATCH_BYTES, 12 * PATCH_BYTES)


async def test_memory_of_images_that_are_counted_is_free_again():
    held = len(CAT) + len(seen(CAT).patches)
    conversation = pb.Conversation(messages=[user(CAT)])
    async with vision_stack(max_image_memory_bytes=4 * held) as (_, stack, _):
        for _ in range(3):
            await stack.stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
        assert await answer(stack.stub.Chat(chat(user(CAT)))) == "a cat"
