"""Tools that a vendor runs on its own servers, which nothing here can run."""

from collections.abc import Sequence

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request_counts import HOSTED_KINDS


def hosted_kind(tool_type: str) -> str | None:
    """Returns which of HOSTED_KINDS a tool's type is a version of; None if it is of none."""
    return next((kind for kind in HOSTED_KINDS if _is_version(tool_type, kind)), None)


def check_hosted(
    kinds: Sequence[str], *, has_others: bool, demanded: str | None = None, is_strict: bool = False
) -> Sequence[str]:
    """Returns the kinds of hosted tools in a request, which are left out beside other tools.

    Args:
        kinds: the kinds of all hosted tools that the request offers.
        has_others: whether it offers others, too, so that the model may go on without these.
        demanded: the kind that it demands a call of; None for none.
        is_strict: refuses all.

    Raises:
        InvalidRequestError: the request is not served without a hosted tool.
    """
    if demanded is not None:
        raise InvalidRequestError(
            f"tool_choice: {demanded!r} is a tool of the vendor's own servers, which is not"
            " supported here",
            field="tool_choice",
        )
    if kinds and (is_strict or not has_others):
        raise InvalidRequestError(
            f"tools: {kinds[0]!r} is a tool of the vendor's own servers, which is not supported"
            " here; functions are",
            field="tools",
        )
    return kinds


def _is_version(tool_type: str, kind: str) -> bool:
    return tool_type == kind or tool_type.startswith(f"{kind}_")
