"""The process that decodes images and cuts them into patches, started by `reader`."""

import io
import math
import os
import resource
from collections.abc import Callable

from PIL import Image

from services.frontend.errors import InvalidRequestError
from services.frontend.images.files.decoding import decode
from services.frontend.images.files.header import Format, read_header
from services.frontend.images.frames import Opening, Question, answer_of
from services.frontend.images.limits import ImageLimits
from services.frontend.images.processor import ImageProcessor
from services.processes.helper_program import Answer, Refusal, limit_resources, run_helper

_NICENESS = 5
"""The event loop has priority on a shared core."""


def open_worker(opening: bytes) -> Callable[[bytes], Answer]:
    """Loads the decoders, takes the limits, and returns the function that answers questions."""
    os.nice(_NICENESS)
    settings = Opening.from_bytes(opening)
    limits = settings.limits
    processor = ImageProcessor(
        settings.kind,
        settings.settings,
        image_token_id=settings.image_token_id,
        max_patches=settings.max_patches,
    )
    Image.MAX_IMAGE_PIXELS = None  # `read_header` has the limit
    _load_decoders(limits)
    limit_resources(max_memory_bytes=limits.memory_bytes)
    # A decoder that a file takes over opens no file and no connection.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))

    def answer(content: bytes) -> Answer:
        _limit_cpu_time(limits.cpu_s)
        question = Question.from_bytes(content)
        try:
            image = decode(question.data, read_header(question.data, limits))
            patches = processor.patches(
                image, is_only_image=question.is_only_image, max_patches=question.max_patches
            )
        except InvalidRequestError as error:
            raise Refusal(str(error)) from None
        except MemoryError:
            raise Refusal("the image takes too much memory to resize") from None
        return answer_of(patches)

    return answer


def _load_decoders(limits: ImageLimits) -> None:
    """Decodes an image of each format, as decoders load parts of themselves on first use."""
    for name in Format:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, name.value)
        decode(file.getvalue(), read_header(file.getvalue(), limits))


def _limit_cpu_time(limit_s: int) -> None:
    """Ends this process after more seconds of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + limit_s, most)
    )


if __name__ == "__main__":
    run_helper(open_worker)
