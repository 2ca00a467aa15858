"""The base of all request bodies: every field is read or refused, none is ignored.

A null counts as an absent field at every depth, even in an unknown field: clients send back parts
of responses.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from services.frontend.http.refusals import UNKNOWN_FIELD


class Body(BaseModel):
    """Part of a body: unknown fields are refused unless they are null."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        extra="allow",
        # Read unknown fields, to refuse them by name.
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise PydanticCustomError(UNKNOWN_FIELD, "{name} is not supported", {"name": name})
        return self
