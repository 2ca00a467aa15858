"""Reads the images of prompts, and puts their tokens where the chat template names them."""

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.frontend.access.caller import Lease
from services.frontend.access.held_bytes import HeldBytes
from services.frontend.engine_client.messages import PlacedImage
from services.frontend.engine_client.model_identity import packed_processor
from services.frontend.errors import FrontendError, InvalidRequestError
from services.frontend.images.files.header import read_header
from services.frontend.images.media.fetcher import MediaFetcher
from services.frontend.images.processor import ProcessedImage
from services.frontend.images.reader import ImageReader
from services.frontend.pipeline.image_cache import ImageCache
from services.frontend.pipeline.image_files import ImageFile
from services.frontend.pipeline.image_reading import PromptImageLimits
from services.frontend.pipeline.prompt_size import check_num_tokens
from services.frontend.pipeline.request import Conversation
from services.frontend.pipeline.request_counts import (
    NO_VISION,
    TOO_MANY_IMAGES,
    UNFETCHED,
    UNPLACED,
    UNREAD,
    ImageCounts,
)
from services.frontend.pipeline.served_model import ServedModel, template_token_id
from services.frontend.text.content_parts import has_images
from services.transport.counts import Counts

ROLES = ("user", "tool")
"""Roles whose messages may have images."""
MAX_CALLS = 4
"""Images of one request that are fetched or read at a time, in turns with other requests'."""
INLINE_BYTES = 2**16
"""Longer files are hashed in a thread; this length takes 0.1 ms."""
LOW_DETAIL_PATCHES = 1024
"""Most patches of an image of low detail: 512 x 512 pixels where a patch has 16 x 16."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's tokens, and the images among them in their order."""

    token_ids: list[int]
    images: Sequence[PlacedImage] = ()

    def last(self, num_tokens: int) -> "EncodedPrompt":
        """Returns the last tokens, without an image of which a part would be cut off."""
        start = max(0, len(self.token_ids) - num_tokens)
        for image in self.images:
            end = image.offset + image.num_tokens
            if image.offset < start < end:
                start = end
        kept = [
            replace(image, offset=image.offset - start)
            for image in self.images
            if image.offset >= start
        ]
        return EncodedPrompt(self.token_ids[start:], kept)


class PromptImages:
    """Images of all requests, within limits."""

    def __init__(
        self,
        limits: PromptImageLimits,
        fetcher: MediaFetcher | None,
        *,
        counts: Counts,
        figures: ImageCounts,
    ) -> None:
        """Fetches no images without a fetcher."""
        self._limits = limits
        self._fetcher = fetcher
        self._figures = figures
        self._cache = ImageCache(limits.max_cached_bytes)
        self._held = HeldBytes(
            counts,
            "image_bytes",
            "images of unfinished requests",
            limit=limits.max_held_bytes,
            limit_per_account=limits.max_held_bytes // 4,
        )

    def check(
        self,
        model: ServedModel,
        conversation: Conversation,
        lease: Lease,
        *,
        parses_special_tokens: bool,
    ) -> list[ImageFile]:
        """Returns a conversation's images before it is rendered, and counts their bytes.

        Raises:
            InvalidRequestError: there are too many, they are in others' messages than those of
                users and tools, or the model sees none.
            OverloadedError: images take too much memory.
        """
        files = conversation.images
        if not files:
            return []
        if model.image_reader is None:
            told = model.image_error or "it sees no images"
            raise self._refusal(NO_VISION, f"the model {model.info.model!r} takes text: {told}")
        if len(files) > self._limits.max_per_request:
            raise self._refusal(
                TOO_MANY_IMAGES,
                f"there are {len(files)} images; the limit is {self._limits.max_per_request}",
            )
        if parses_special_tokens:
            raise self._refusal(
                UNPLACED,
                "parse_special_tokens lets texts spell the model's image token; leave it out of a"
                " conversation with images",
            )
        for message in conversation.messages:
            if message["role"] not in ROLES and has_images(message.get("content")):
                raise self._refusal(
                    UNPLACED,
                    f"a message of {message['role'][:64]!r} has an image; messages of"
                    f" {' and '.join(ROLES)} may have them",
                )
        lease.hold(self._held, sum(len(file.data) for file in files))
        return files

    async def placed(
        self,
        model: ServedModel,
        token_ids: list[int],
        files: Sequence[ImageFile],
        lease: Lease,
        *,
        max_tokens: int | None,
    ) -> EncodedPrompt:
        """Returns a conversation's tokens with those of its images; refuses `max_tokens` or more.

        Raises:
            InvalidRequestError: an image cannot be read, or the template names other images.
            OverloadedError: images take too much memory, or too many wait.
        """
        if model.image_reader is None:
            return EncodedPrompt(token_ids)
        image_token_id = template_token_id(model.info)
        num_named = token_ids.count(image_token_id)
        if num_named != len(files):
            raise self._refusal(
                UNPLACED,
                f"the prompt has {num_named} image tokens for {len(files)} images",
            )
        if not files:
            return EncodedPrompt(token_ids)
        images = await self._read_all(model.image_reader, model, files, lease)
        if max_tokens is not None:
            num_more = sum(len(image.tokens) - 1 for image in images)
            check_num_tokens(len(token_ids) + num_more, max_tokens)
        return _with_images(token_ids, images, image_token_id)

    async def _read_all(
        self, reader: ImageReader, model: ServedModel, files: Sequence[ImageFile], lease: Lease
    ) -> list[ProcessedImage]:
        contents = await _all_of(self._load(file, lease) for file in files)
        with self._counting(UNREAD):
            self._check_pixels(contents)
        settings = packed_processor(model.info)
        kinds = [(settings, lease.account, each.is_low_detail, len(files) == 1) for each in files]
        return await _all_of(
            self._read(reader, data, lease, kind)
            for data, kind in zip(contents, kinds, strict=True)
        )

    async def _load(self, file: ImageFile, lease: Lease) -> bytes:
        """Returns a file's bytes, fetched if they are elsewhere."""
        if file.data:
            return file.data
        if self._fetcher is None:
            raise self._refusal(
                UNFETCHED,
                "images are not fetched from URLs here, as --media-hosts names no hosts; send data:"
                " URLs",
            )
        with self._counting(UNFETCHED):
            data = await self._fetcher.fetch(file.url)
        lease.hold(self._held, len(data))
        return data

    def _check_pixels(self, contents: Sequence[bytes]) -> None:
        """Refuses images by their size, before the first one is decoded."""
        headers = [read_header(data, self._limits.image) for data in contents]
        num_pixels = sum(header.width * header.height for header in headers)
        if num_pixels > self._limits.max_pixels_per_request:
            raise InvalidRequestError(
                f"the images have {num_pixels} pixels; the limit is"
                f" {self._limits.max_pixels_per_request}"
            )

    async def _read(
        self,
        reader: ImageReader,
        data: bytes,
        lease: Lease,
        kind: tuple[bytes, str, bool, bool],
    ) -> ProcessedImage:
        """Reads an image, or finds it among those of its kind that were read lately."""
        start_s = time.monotonic()
        *_, is_low_detail, is_only_image = kind
        key = (*kind, await _digest_of(data))
        image = self._cache.get(key)
        if image is not None:
            self._figures.num_cached += 1
        else:
            with self._counting(UNREAD):
                image = await reader.read(
                    data,
                    account=lease.account,
                    is_only_image=is_only_image,
                    max_patches=LOW_DETAIL_PATCHES if is_low_detail else None,
                )
            self._cache.put(key, image)
            self._figures.num_read += 1
            self._figures.read.observe(time.monotonic() - start_s)
        lease.hold(self._held, len(image.patches))
        return image

    @contextmanager
    def _counting(self, reason: str) -> Iterator[None]:
        """Counts a refusal, and says that the prompt has what is refused."""
        try:
            yield
        except InvalidRequestError as error:
            raise self._refusal(reason, str(error)) from None
        except FrontendError:
            self._figures.refused[reason] += 1
            raise

    def _refusal(self, reason: str, message: str) -> InvalidRequestError:
        self._figures.refused[reason] += 1
        return InvalidRequestError(message, field="prompt")


def _with_images(
    token_ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int
) -> EncodedPrompt:
    """Replaces each image token of a prompt by the tokens of the next image."""
    longer: list[int] = []
    placed: list[PlacedImage] = []
    start = 0
    for image in images:
        end = token_ids.index(image_token_id, start)
        longer += token_ids[start:end]
        placed.append(
            PlacedImage(
                digest=image.digest,
                grid=image.grid,
                patches=image.patches,
                offset=len(longer),
                num_tokens=len(image.tokens),
            )
        )
        longer += image.tokens
        start = end + 1
    return EncodedPrompt([*longer, *token_ids[start:]], placed)


async def _all_of(calls: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Returns the results of calls of one request, of which a few run at a time."""
    turns = asyncio.Semaphore(MAX_CALLS)

    async def run(call: Coroutine[Any, Any, _Result]) -> _Result:
        async with turns:
            return await call

    waiting = list(calls)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call)) for call in waiting]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for call in waiting:
            call.close()  # one that has not begun
    return [task.result() for task in tasks]


async def _digest_of(data: bytes) -> bytes:
    if len(data) <= INLINE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
