"""Images from files to tokens: both services, over HTTP, against transformers on the same files."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest
import torch
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from tests.integration.conftest import Served
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.engine_fleet import engine_fleet
from tests.support.forked_program import run_forked, run_octavo
from tests.support.processes import free_port, stack
from tests.support.vision import IMAGE_ID, TEMPLATE, vision_tokenizer
from tests.support.vision_variants import write_vision_checkpoint
from tests.support.waiting import until

VOCAB_SIZE = 600
NUM_OUTPUT = 10
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def photograph(seed: int, width: int = 150, height: int = 90) -> Image.Image:
    """A gradient with noise and a word, as far as photographs go."""
    draw = np.random.default_rng(seed)
    across = np.linspace(0, 200, width)[None, :, None] * draw.random(3)
    down = np.linspace(0, 55, height)[:, None, None]
    noise = draw.integers(0, 20, (height, width, 3))
    image = Image.fromarray((across + down + noise).clip(0, 255).astype(np.uint8))
    ImageDraw.Draw(image).text((20, 30), f"number {seed}", fill=(250, 250, 250))
    return image


def data_url(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Qwen3-VL with a tokenizer, a template and a processor, and transformers' model."""
    folder = tmp_path_factory.mktemp("seeing")
    reference = write_vision_checkpoint(
        folder,
        "qwen3_vl",
        {"image_token_id": IMAGE_ID, "video_token_id": VOCAB_SIZE - 1},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
    )
    files = tokenizer_files(chat_template=TEMPLATE)
    files["tokenizer.json"] = vision_tokenizer().to_str().encode()
    files["preprocessor_config.json"] = json.dumps(PROCESSOR).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder, reference


@pytest.fixture(scope="module")
def seeing(checkpoint):
    folder, _ = checkpoint
    port = free_port()
    engine = {
        "model": folder,
        "served_model_name": "seeing",
        "max_model_len": 2048,
        "allow_watch_tokens": True,
    }
    with stack(engine=engine, frontend={"http_port": port}) as services:
        yield Served(services, f"http://127.0.0.1:{port}/v1")


@pytest.fixture
async def client(seeing) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=seeing.url, api_key="none", max_retries=0) as connected:
        yield connected


def expected(reference, text, images):
    """An answer by transformers from the pictures themselves, as `answered` returns it."""
    processor = Qwen2VLImageProcessorPil(
        **{key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    )
    token_ids = vision_tokenizer().encode(text, add_special_tokens=False).ids
    inputs = processor(images=images, return_tensors="pt") if images else {}
    counts = iter(inputs["image_grid_thw"].prod(-1) // 4) if images else iter(())
    spread = []
    for token_id in token_ids:
        spread += [token_id] * int(next(counts)) if token_id == IMAGE_ID else [token_id]
    num_prompt, logprobs = len(spread), []
    while len(spread) < num_prompt + NUM_OUTPUT:
        whole = torch.tensor([spread])
        types = {"mm_token_type_ids": (whole == IMAGE_ID).int()} if images else {}
        with torch.inference_mode():
            own = reference(whole, **inputs, **types).logits[0, -1].log_softmax(-1)
        allowed = own.clone()
        allowed[[IMAGE_ID, VOCAB_SIZE - 1]] = -torch.inf
        spread.append(int(allowed.argmax()))
        logprobs.append(float(own[spread[-1]]))
    text = vision_tokenizer().decode(spread[num_prompt:])
    return text, num_prompt, pytest.approx(logprobs, abs=2e-3)


def prompt_text(*turns):
    lines = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
    return "".join(lines) + "<|im_start|>assistant\n"


async def answered(client, messages):
    """The text of an answer, the tokens of its prompt, and its log-probabilities."""
    answer = await client.chat.completions.create(
        model="seeing",
        messages=messages,
        temperature=0,
        max_tokens=NUM_OUTPUT,
        logit_bias={str(IMAGE_ID): -100, str(VOCAB_SIZE - 1): -100},
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    [choice] = answer.choices
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    return choice.message.content, answer.usage.prompt_tokens, logprobs


def user(*parts):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part[0]}}
        for part in parts
    ]
    return {"role": "user", "content": content}


async def test_an_answer_about_an_image_is_that_of_transformers(client, checkpoint):
    _, reference = checkpoint
    image = photograph(1)
    wanted = expected(reference, prompt_text(("user", "What is (<|image|>) this?")), [image])
    url = data_url(image)
    assert await answered(client, [user("What is ", (url,), " this?")]) == wanted
    # Again, with the prefix in the cache.
    assert await answered(client, [user("What is ", (url,), " this?")]) == wanted


async def test_several_images_and_their_history(client, checkpoint):
    _, reference = checkpoint
    images = [photograph(2, 60, 61), photograph(3, 200, 20), photograph(4)]
    text = prompt_text(
        ("user", "One (<|image|>)(<|image|>) two"), ("assistant", "Yes"), ("user", "(<|image|>)")
    )
    urls = [(data_url(image),) for image in images]
    messages = [
        user("One ", *urls[:2], " two"),
        {"role": "assistant", "content": "Yes"},
        user(urls[2]),
    ]
    assert await answered(client, messages) == expected(reference, text, images)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"lossless": True}), ("GIF", {})]
)
async def test_formats(client, checkpoint, kind, options):
    _, reference = checkpoint
    url = data_url(photograph(5), kind, **options)
    decoded = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    wanted = expected(reference, prompt_text(("user", "(<|image|>)")), [decoded])
    assert await answered(client, [user((url,))]) == wanted


async def test_images_of_the_same_tokens_are_told_apart(client, checkpoint):
    _, reference = checkpoint
    for seed in (6, 7, 6):
        image = photograph(seed)
        wanted = expected(reference, prompt_text(("user", "(<|image|>)")), [image])
        assert await answered(client, [user((data_url(image),))]) == wanted


async def test_a_spelled_image_token_is_text(client, checkpoint):
    answer = await client.chat.completions.create(
        model="seeing", messages=[user("<|image|>")], max_tokens=1
    )
    assert answer.usage.prompt_tokens > 20


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,AAAA", "image"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "not supported"),
        ("https://example.com/a.png", "media-hosts"),
        ("http://127.0.0.1/a.png", "media-hosts"),
        ("file:///etc/passwd", "data"),
    ],
)
async def test_other_images_are_refused_and_others_are_served(client, url, words):
    with pytest.raises(openai.BadRequestError, match=words):
        await answered(client, [user((url,))])
    assert (await answered(client, [user("hello")]))[2]


async def test_steps_with_an_image_from_before_the_recording_are_replayed(
    seeing, client, checkpoint, tmp_path
):
    folder, _ = checkpoint
    messages = [user("Again ", (data_url(photograph(9)),), "?")]
    first = await answered(client, messages)
    path = tmp_path / "trace.binpb"
    command = ("record", "--out", path, "--steps", 8, "--engine", seeing.services.engine.address)
    recorder = asyncio.create_task(asyncio.to_thread(run_octavo, *command))
    partial = path.with_name(path.name + ".part")
    await until(lambda: partial.exists() and partial.stat().st_size, timeout_s=60)
    assert await answered(client, messages) == first
    assert (await recorder).returncode == 0
    command = ("services.engine", "replay", path, "--device", "cpu", "--model", folder)
    ended = await asyncio.to_thread(run_forked, *map(str, (*command, "--against", "eager")))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 steps against eager" in ended.stdout


async def test_an_answer_about_an_image_goes_on_when_its_engine_is_killed(checkpoint):
    folder, _ = checkpoint
    file = base64.b64decode(data_url(photograph(8)).partition(",")[2])
    part = pb.ContentPart
    parts = [part(text="What is "), part(image=file), part(text=" this?")]
    sampling = SamplingParams(
        max_tokens=60, temperature=0, ignore_eos=True, logit_bias={IMAGE_ID: -100.0}
    )
    asked = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", parts=parts)],
        options=pb.GenerationOptions(sampling=sampling),
    )
    async with engine_fleet(2, engine={"model": folder, "max_model_len": 2048}) as fleet:

        async def answer() -> tuple[list[int], int]:
            outputs = [each.output async for each in fleet.stub.Chat(asked)]
            tokens = [token for output in outputs for token in output.token_ids]
            return tokens, outputs[-1].usage.prompt_tokens

        expected = await answer()
        fleet.stop_after(20)
        running = asyncio.create_task(answer())
        victim = await fleet.stopped()
        victim.kill()
        assert await running == expected
        listing = await fleet.listing()
        assert listing.num_migrations == 1
        assert len(expected[0]) == 60
