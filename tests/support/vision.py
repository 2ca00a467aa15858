"""A model that sees images, as far as a frontend knows it, and pictures for it."""

import hashlib
import struct
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import numpy as np
import tokenizers

from protos.engine.v1 import engine_pb2
from services.frontend.config import FrontendConfig
from services.frontend.engine_client.messages import ModelInfo
from services.frontend.errors import InvalidRequestError
from services.frontend.server import image_parts
from tests.support.byte_tokenizer import tokenizer_files, tokenizer_json
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import FrontendStack, frontend_stack

IMAGE_TOKEN, BREAK_TOKEN = "<|image|>", "<|break|>"
TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.content is string %}{{- message.content }}
{%- elif message.content is not none %}
{%- for part in message.content %}
{%- if part.type == "image" %}{{- "(<|image|>)" }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}{{- "<call>" + call.function.name }}{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
"""Takes images in all messages."""
PATCH_PIXELS = 16
PATCH_BYTES = 3 * PATCH_PIXELS**2


def vision_tokenizer(*, is_special: bool = True) -> tokenizers.Tokenizer:
    """Returns the byte tokenizer with tokens for images; `is_special` is of the image's own."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json())
    image = tokenizers.AddedToken(IMAGE_TOKEN, special=is_special, normalized=False)
    tokenizer.add_tokens([image]) if not is_special else tokenizer.add_special_tokens([image])
    tokenizer.add_special_tokens([BREAK_TOKEN])
    return tokenizer


IMAGE_ID = vision_tokenizer().token_to_id(IMAGE_TOKEN)
BREAK_ID = vision_tokenizer().token_to_id(BREAK_TOKEN)


def vision_engine(
    reply: str = "a cat",
    *,
    template: str = TEMPLATE,
    is_special: bool = True,
    max_image_bytes: int = 2**24,
    kind: str = "test",
    settings: str = "{}",
    place: Mapping[str, object] = {},  # read only
    **options: object,
) -> FakeEngine:
    """Returns an engine that sees images and answers everything with one text.

    place: fields of ImageProcessor about the place of an image in the template.
    """
    files = tokenizer_files(chat_template=template)
    files["tokenizer.json"] = vision_tokenizer(is_special=is_special).to_str().encode()
    processor = engine_pb2.ImageProcessor(
        kind=kind,
        settings=settings,
        image_token_id=IMAGE_ID,
        max_patches=4096,
        max_image_bytes=max_image_bytes,
        **place,
    )
    options = {"script": says(reply), "max_model_len": 8192} | options
    return FakeEngine(files=files, image_processor=processor, **options)


def png(width: int = 32, height: int = 32, *, colour: int = 0) -> bytes:
    """Returns a picture of one colour."""
    rows = (b"\0" + bytes([colour, 0, 255]) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@dataclass(frozen=True)
class SeenImage:
    """A picture as the engine takes it: a token for each patch, with breaks between rows."""

    digest: bytes
    grid: tuple[int, int]
    patches: bytes

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in a prompt."""
        rows, columns = self.grid
        return [BREAK_ID, *[IMAGE_ID] * columns] * rows


def seen(file: bytes) -> SeenImage:
    """Returns a picture of `png` as the reader below reads it."""
    width, height = struct.unpack(">II", file[16:24])
    grid = height // PATCH_PIXELS, width // PATCH_PIXELS
    num_bytes = grid[0] * grid[1] * PATCH_BYTES
    patches = (file * (1 + num_bytes // len(file)))[:num_bytes]
    return SeenImage(hashlib.sha256(repr(grid).encode() + patches).digest(), grid, patches)


@dataclass
class Reader:
    """Reads pictures of `png` without decoding them, and notes what it was asked."""

    asked: list[dict[str, object]] = field(default_factory=list)
    is_closed: bool = False

    def open(self, info: ModelInfo) -> "Reader":
        """Opens itself for the model of `vision_engine`."""
        assert info.image_processor.kind == "test"
        return self

    async def read(self, data: bytes, **asked: object) -> SeenImage:
        """Reads a picture."""
        self.asked.append(asked)
        if not data.startswith(b"\x89PNG"):
            raise InvalidRequestError("the image is no PNG")
        return seen(data)

    async def close(self) -> None:
        """Notes the end."""
        self.is_closed = True


@asynccontextmanager
async def vision_stack(
    engine: FakeEngine | None = None,
    *others: FakeEngine,
    fetcher: object = None,
    **config: object,
) -> AsyncIterator[tuple[FakeEngine, FrontendStack, Reader]]:
    """Starts a frontend that reads images with a `Reader`, and fetches them with a fetcher."""
    reader = Reader()
    limits = {name: value for name, value in config.items() if "image" in name or "pixel" in name}
    parts = replace(image_parts(FrontendConfig(**limits)), open_reader=reader.open, fetcher=fetcher)
    async with (
        engine or vision_engine() as engine,
        frontend_stack(engine, *others, images=parts, **config) as stack,
    ):
        yield engine, stack, reader


@asynccontextmanager
async def vision_http(
    engine: FakeEngine | None = None, **config: object
) -> AsyncIterator[tuple[FakeEngine, Reader, httpx.AsyncClient]]:
    """Starts the same with HTTP, and a client of it."""
    async with (
        vision_stack(engine, http_port=0, **config) as (engine, stack, reader),
        stack.http_client() as client,
    ):
        yield engine, reader, client


def shown(engine: FakeEngine, index: int = -1) -> str:
    """Returns the prompt of a request that the engine got, with <ROWSxCOLUMNS> for each image."""
    submit = engine.submits[index]
    ids = np.frombuffer(submit.prompt_token_ids, "<u4").tolist()
    tokenizer, text, start = vision_tokenizer(), "", 0
    for image in submit.images:
        end = image.offset + image.num_tokens
        rows = ids[image.offset : end].count(BREAK_ID)
        text += tokenizer.decode(ids[start : image.offset], skip_special_tokens=False)
        text += f"<{rows}x{image.num_tokens // rows - 1}>"
        start = end
    return text + tokenizer.decode(ids[start:], skip_special_tokens=False)


def said(role: str, text: str) -> str:
    """Returns a turn as the template writes it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def prompt(*turns: tuple[str, str]) -> str:
    """Returns the prompt of turns as the template writes them."""
    return "".join(said(*turn) for turn in turns) + "<|im_start|>assistant\n"
