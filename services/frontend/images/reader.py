"""Reads images in helper processes, so that a hostile file costs its sender alone."""

import asyncio
from functools import partial

import structlog

from services.frontend.errors import EngineUnavailableError, InvalidRequestError, OverloadedError
from services.frontend.images.files.header import read_header
from services.frontend.images.frames import HEAD_BYTES, Opening, Question, read_answer
from services.frontend.images.limits import ImageLimits
from services.frontend.images.processor import ImageProcessor, ProcessedImage
from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperError,
    HelperRefusalError,
)
from services.processes.helper_pool import HelperPool
from services.transport.fair_turns import FairTurns

MAX_WAITING = 512
MAX_WAITING_OF_ACCOUNT = 128
"""Images that wait for a process; they are read at some 25 megapixels a second and core."""
LARGE_PIXELS = 16_000_000
"""Larger images are read one at a time: they take up to 1 GiB each, and senders a few kilobytes."""
WAIT_S = 60.0
"""Time limit of the wait for a process."""
START_TIMEOUT_S = 30.0
"""Time limit for a new process to start, generous for busy machines."""
RETRY_AFTER_MS = 1000
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    # Buffers of small images are used again. Otherwise each comes from the system as pages to be
    # zeroed: 30 instead of 18 ms for a JPEG of 1 megapixel in a virtual machine, 2026-11.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}
_WORKER = "services.frontend.images.worker"

log = structlog.get_logger()


class ImageReader:
    """Turns image files into patches for one model.

    Processes start with the first images. One that crashes, takes too long or too much memory is
    replaced, and only the image that it read is refused. Accounts take turns. Of large images, only
    one is read at a time.
    """

    def __init__(
        self,
        kind: str,
        settings: str,
        *,
        image_token_id: int,
        max_patches: int,
        num_processes: int,
        limits: ImageLimits | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            kind: with `settings`, `image_token_id` and `max_patches` the fields of GetModelInfo's
                `ImageProcessor`.
            settings: JSON.
            image_token_id: the token that stands for a vector of the encoder.
            max_patches: most patches of an image.
            num_processes: images that are read at a time.
            limits: the most that an image may take.

        Raises:
            ImageSettingsError: the settings cannot be followed.
        """
        self._limits = limits or ImageLimits()
        self._processor = ImageProcessor(
            kind, settings, image_token_id=image_token_id, max_patches=max_patches
        )
        opening = Opening(
            kind=kind,
            settings=settings,
            image_token_id=image_token_id,
            max_patches=max_patches,
            limits=self._limits,
        )
        self._pool = HelperPool(
            _WORKER,
            opening.to_bytes(),
            num_processes=num_processes,
            start_timeout_s=START_TIMEOUT_S,
            environment=_ENVIRONMENT,
            memory_bytes=HEAD_BYTES
            + max(self._limits.max_bytes, self._processor.max_patches_bytes),
        )
        self._turns = FairTurns(num_processes)
        self._large_turns = FairTurns(1)
        self._num_unfinished = 0
        self._num_processes = num_processes

    async def read(
        self,
        data: bytes,
        *,
        account: str = "",
        is_only_image: bool = True,
        max_patches: int | None = None,
    ) -> ProcessedImage:
        """Reads a PNG, JPEG, WebP or GIF file.

        Args:
            data: the file.
            account: takes turns with others.
            is_only_image: whether its prompt has no other image.
            max_patches: shrinks the image further, for less detail; see `ImageProcessor.patches`.

        Raises:
            InvalidRequestError: the file is damaged, not supported, or over a limit.
            OverloadedError: too many images wait.
            EngineUnavailableError: no process can be started now.
        """
        header = read_header(data, self._limits)  # what no process needs to see is refused here
        self._check_queue(account)
        if max_patches is None:
            max_patches = self._processor.max_patches
        question = Question(data=data, is_only_image=is_only_image, max_patches=max_patches)
        work = partial(self._turns.run, account, partial(self._ask, question), wait_s=WAIT_S)
        self._num_unfinished += 1
        try:
            if header.width * header.height > LARGE_PIXELS:
                return await self._large_turns.run(account, work, wait_s=WAIT_S)
            return await work()
        except TimeoutError:
            raise OverloadedError(
                "the processes that read images are busy", retry_after_ms=RETRY_AFTER_MS
            ) from None
        finally:
            self._num_unfinished -= 1

    async def close(self) -> None:
        """Ends the processes after the current images."""
        await self._pool.close()

    def _check_queue(self, account: str) -> None:
        own = self._turns.num_waiting(account) + self._large_turns.num_waiting(account)
        for num_waiting, whose, limit in (
            (self._num_unfinished - self._num_processes, "", MAX_WAITING),
            (own, "of your ", MAX_WAITING_OF_ACCOUNT),
        ):
            if num_waiting >= limit:
                raise OverloadedError(
                    f"{num_waiting} {whose}images wait to be read; the limit is {limit}",
                    retry_after_ms=RETRY_AFTER_MS,
                )

    async def _ask(self, question: Question) -> ProcessedImage:
        try:
            answer = await self._pool.ask(
                question.to_bytes(),
                timeout_s=self._limits.timeout_s,
                wait_s=WAIT_S,
                max_answer_bytes=HEAD_BYTES + self._processor.max_patches_bytes,
            )
        except HelperRefusalError as error:
            raise InvalidRequestError(str(error)) from None
        except HelperBrokenError as error:
            raise InvalidRequestError(f"the image cannot be read: decoding it {error}") from None
        except HelperBusyError as error:
            raise OverloadedError(
                f"the process that reads images {error}", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except HelperError as error:
            raise EngineUnavailableError(
                f"the image could not be read: the process for images {error}",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None
        # Hashed here: a file that takes a decoder over must not choose its digest, which would be
        # another image in caches. Hashing releases the interpreter's lock.
        try:
            return await asyncio.to_thread(self._assemble, answer)
        except ValueError as error:
            log.warning("image_helper_answered_nonsense", reason=str(error))
            raise InvalidRequestError("the image cannot be read: decoding it broke down") from None

    def _assemble(self, answer: bytes) -> ProcessedImage:
        return self._processor.assemble(*read_answer(answer))
