"""Checks that a request is of the kind that the engine serves."""

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.errors import InvalidRequestError, UnsupportedError


def check_task(model: ModelFolder, *, pools: bool, has_sampling: bool = False) -> None:
    """Checks a request against --task.

    Args:
        model: the served one.
        pools: whether the request asks for a vector.
        has_sampling: whether it says how to sample.

    Raises:
        UnsupportedError: the engine generates and the request asks for a vector, or the reverse.
        InvalidRequestError: it asks for a vector and says how to sample.
    """
    if model.pooling is not None and not pools:
        raise UnsupportedError(
            f"model {model.name!r} is served with --task {model.pooling.task}: it generates no"
            " tokens"
        )
    if model.pooling is None and pools:
        raise UnsupportedError(
            f"model {model.name!r} is served to generate: vectors and scores need --task embed or "
            "--task score"
        )
    if pools and has_sampling:
        raise InvalidRequestError("sampling does not go with pool", field="sampling")
