"""Reads the images of a prompt, with every check that the worker relies on."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from protos.engine.v1.engine_pb2 import Image
from services.engine.checkpoint.image_input import ImageInput
from services.engine.edge.session_images import SessionImages
from services.engine.errors import InvalidRequestError
from services.engine.prompt_image import PromptImage

FIELD = "images"


def read_images(
    images: Iterable[Image],
    held: SessionImages,
    prompt: npt.NDArray[np.uint32],
    image_input: ImageInput | None,
) -> tuple[PromptImage, ...]:
    """Returns the images of a prompt.

    Args:
        images: of the request.
        held: the images that the session has sent.
        prompt: its tokens.
        image_input: what the model sees; None if it sees nothing.

    Raises:
        InvalidRequestError: the model sees no images, one was not sent, or the prompt does not have
            an image token for each of its vectors there.
    """
    read: list[PromptImage] = []
    for each in images:
        if image_input is None:
            raise InvalidRequestError("this model sees no images", field=FIELD)
        image = held.find(each.digest)
        first = read[-1].end if read else 0
        end = each.offset + each.num_tokens
        if not first <= each.offset < end <= len(prompt):
            raise InvalidRequestError(
                f"an image has tokens {each.offset} to {end} of a prompt of {len(prompt)}; images "
                "follow each other in its tokens",
                field=FIELD,
            )
        num_vectors = image_input.num_vectors(image.grid)
        num_places = int(np.count_nonzero(prompt[each.offset : end] == image_input.token_id))
        if num_places != num_vectors or (image_input.has_mrope and num_vectors != each.num_tokens):
            raise InvalidRequestError(
                f"an image of {num_vectors} vectors has {num_places} image tokens of "
                f"{each.num_tokens}",
                field=FIELD,
            )
        read.append(
            PromptImage(
                image=image,
                offset=each.offset,
                num_tokens=each.num_tokens,
                num_vectors=num_vectors,
            )
        )
    return tuple(read)
