"""Versions of the weights in answers: an extension of the usage."""

from typing_extensions import TypedDict

from services.frontend.engine_client.messages import Usage


class WeightsField(TypedDict, total=False):
    """Absent from answers of the weights that an engine started with, unless those have a name."""

    weights_version: str
    """Version of the weights at the last token."""
    first_weights_version: str
    """Version of the weights at the first token, if it is another one."""


def weights_of(usage: Usage) -> WeightsField:
    """Returns the versions in a usage."""
    field: WeightsField = {}
    is_moved = usage.HasField("first_weights_version")
    if usage.weights_version or is_moved:
        field["weights_version"] = usage.weights_version
    if is_moved:
        field["first_weights_version"] = usage.first_weights_version
    return field
