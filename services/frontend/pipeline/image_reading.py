"""Interfaces through which the pipeline reads images, and their limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.frontend.engine_client.messages import ModelInfo


class ReadImage(Protocol):
    """An image as an engine takes it."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of settings, grid and patches."""

    @property
    def grid(self) -> Sequence[int]:
        """Positions of the patches."""

    @property
    def patches(self) -> bytes:
        """uint8."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids that replace the image's one token in a prompt."""


class ImageReader(Protocol):
    """Reads image files as one model sees them."""

    async def read(
        self,
        data: bytes,
        *,
        account: str,
        is_only_image: bool,
        max_patches: int | None,
    ) -> ReadImage:
        """Reads a file for an account, which takes turns with others.

        Args:
            data: the file.
            account: whose it is.
            is_only_image: whether its prompt has no other image.
            max_patches: shrinks the image further than the model does; None for no further limit.

        Raises:
            InvalidRequestError: it is no image that can be read.
            OverloadedError: too many images wait.
            EngineUnavailableError: no process can be started.
        """

    async def close(self) -> None:
        """Ends the processes that read."""


class MediaFetcher(Protocol):
    """Fetches files from the hosts that the operator named."""

    async def fetch(self, url: str) -> bytes:
        """Returns a file.

        Raises:
            InvalidRequestError: it may not be fetched, or cannot be.
        """


OpenReader = Callable[[ModelInfo], ImageReader | None]
"""Returns the reader of a model; None if it sees no images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImageLimits:
    """Limits of images."""

    max_per_request: int = 64
    max_held_bytes: int = 2**31
    """Files and patches of live requests; an account may have a quarter."""
    max_cached_bytes: int = 2**28
    """Patches of images that were read lately."""


def open_no_reader(info: ModelInfo) -> None:
    """Opens no reader, whatever the model."""
    del info


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """The parts that read images, and their limits."""

    limits: PromptImageLimits = field(default_factory=PromptImageLimits)
    open_reader: OpenReader = open_no_reader
    """Raises ValueError where a model's settings cannot be followed."""
    fetcher: MediaFetcher | None = None
    """None fetches no URLs."""
