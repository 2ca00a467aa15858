"""Pictures from the openai and anthropic clients, read as a model of Qwen-VL's kind sees them."""

import base64
import io
from contextlib import asynccontextmanager

import anthropic
import numpy as np
import openai
from PIL import Image

from services.frontend.images.processor import ImageProcessor
from tests.support.frontend_stack import frontend_stack
from tests.support.image_files import encoded, picture
from tests.support.image_settings import settings_text
from tests.support.vision import IMAGE_ID, vision_engine

SETTINGS = settings_text("qwen_vl")
PROCESSOR = ImageProcessor("qwen_vl", SETTINGS, image_token_id=IMAGE_ID, max_patches=4096)
JPEG, PNG = encoded(picture(300, 200), "JPEG"), encoded(picture(150, 250), "PNG")


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


@asynccontextmanager
async def running():
    async with (
        vision_engine(kind="qwen_vl", settings=SETTINGS) as engine,
        frontend_stack(engine, http_port=0, num_image_processes=1) as stack,
    ):
        yield engine, stack.http_url


def check_images(engine, *files: bytes) -> None:
    """Checks the images of the last request: what they are, and their tokens in the prompt."""
    submit = engine.submits[-1]
    ids = np.frombuffer(submit.prompt_token_ids, "<u4").tolist()
    assert len(submit.images) == len(files)
    for image, file in zip(submit.images, files, strict=True):
        with Image.open(io.BytesIO(file)) as opened:
            expected = PROCESSOR.process(opened.convert("RGB"))
        assert image.digest == expected.digest
        assert ids[image.offset : image.offset + image.num_tokens] == list(expected.tokens)


async def test_the_openai_client_sends_pictures():
    url = f"data:image/jpeg;base64,{base64_of(JPEG)}"
    chat = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]
    item = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    async with (
        running() as (engine, address),
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": chat}]
        )
        assert answer.choices[0].message.content == "a cat"
        check_images(engine, JPEG)
        response = await client.responses.create(
            model="fake", input=[{"role": "user", "content": item}]
        )
        assert response.output_text == "a cat"
        check_images(engine, JPEG)
        assert response.usage.input_tokens == len(engine.submits[-1].prompt_token_ids) // 4


async def test_the_anthropic_client_sends_a_picture_that_a_tool_has_read():
    def block(file: bytes, kind: str) -> dict:
        source = {"type": "base64", "media_type": f"image/{kind}", "data": base64_of(file)}
        return {"type": "image", "source": source}

    tool = {"name": "Read", "input_schema": {"type": "object", "properties": {}}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(PNG, "png")]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Compare."}, block(JPEG, "jpeg")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with (
        running() as (engine, address),
        anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "fake", "messages": messages, "tools": [tool]}
        message = await client.messages.create(max_tokens=20, **asked)
        assert message.content[0].text == "a cat"
        check_images(engine, JPEG, PNG)
        count = await client.messages.count_tokens(**asked)
        assert count.input_tokens == len(engine.submits[-1].prompt_token_ids) // 4
