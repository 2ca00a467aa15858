"""The base of all request bodies: every field is read, taken without effect, or refused by name.

A null counts as an absent field at every depth, even in an unknown field: clients send back parts
of responses. A name that begins with an underscore is a client's own mark, taken without effect:
resumed conversations of GitHub Copilot have `__copilotMessageSource` in messages.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "octavo_unknown_field"
"""The type of pydantic's error for a field that is not known."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """See `TAKEN`."""


TAKEN = _Taken()
"""Marks a field, in its `Annotated`, that nothing here can follow.

It is taken without effect; with --strict-fields, where the context of validation is true, it is
refused as an unknown field is.
"""


class Body(BaseModel):
    """Part of a body: unknown fields are refused unless they are null or a client's own marks."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        extra="allow",
        # Read unknown fields, to refuse them by name.
        json_schema_extra={
            "additionalProperties": {"type": "null"},
            "patternProperties": {"^_": {}},
        },
    )

    taken: ClassVar[frozenset[str]] = frozenset()
    """Fields marked as `TAKEN`."""
    refuses_unknown: ClassVar[bool] = True
    """Whether unknown fields are refused."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Collects the marked fields."""
        super().__pydantic_init_subclass__(**kwargs)
        fields = cls.model_fields.items()
        cls.taken = frozenset(name for name, field in fields if TAKEN in field.metadata)

    @model_validator(mode="after")
    def _refuse_unknown(self, info: ValidationInfo) -> Self:
        refused = dict(self.model_extra or {}) if self.refuses_unknown else {}
        if info.context:
            refused |= {name: getattr(self, name) for name in self.taken}
        else:
            refused = {name: value for name, value in refused.items() if name[:1] != "_"}
        for name, value in refused.items():
            if value is not None:
                raise PydanticCustomError(UNKNOWN_FIELD, "{name} is not supported", {"name": name})
        return self


class OpenBody(Body):
    """Part of a body that is left out, so its unknown fields may be any."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    refuses_unknown: ClassVar[bool] = False
