"""Forms that an output must have, in plain Python and as flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from protos.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form that an output must have: exactly one of these.

    Raises:
        ValueError: none of them is given, or several are.
    """

    json_schema: str | None = None
    """JSON that this JSON Schema, itself JSON text, accepts."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    lark: str | None = None
    """Text that this grammar produces, in the Lark dialect of llguidance."""
    choice: Sequence[str] = ()
    """One of these texts."""

    def __post_init__(self) -> None:
        """Checks that one form is given."""
        given = (self.json_schema, self.json_object or None, self.regex, self.lark)
        num_given = sum(form is not None for form in given) + bool(self.choice)
        if num_given != 1:
            raise ValueError(f"a structured output takes exactly one form; {num_given} are given")

    def to_proto(self) -> sampling_pb2.StructuredOutput:
        """Returns the wire form."""
        if self.choice:
            choice = sampling_pb2.TextChoice(texts=self.choice)
            return sampling_pb2.StructuredOutput(choice=choice)
        return sampling_pb2.StructuredOutput(
            json_schema=self.json_schema,
            json_object=self.json_object or None,
            regex=self.regex,
            lark=self.lark,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The form of the output, as flags."""

    json_schema: Annotated[Path | None, "File of a JSON Schema that the output follows."] = None
    json_object: Annotated[bool, "The output is a JSON object."] = False
    regex: Annotated[str | None, "Regular expression that the whole output matches."] = None
    lark: Annotated[Path | None, "File of a Lark grammar that produces the output."] = None
    choice: Annotated[Sequence[str], "A text that the output may be; repeatable."] = ()

    def read(self) -> StructuredOutput | None:
        """Returns what the flags ask for; None where they ask for nothing.

        Raises:
            ValueError: several forms are given, or a file cannot be read.
        """
        choice = tuple(self.choice)
        if not (self.json_schema or self.json_object or self.regex is not None or self.lark):
            return StructuredOutput(choice=choice) if choice else None
        return StructuredOutput(
            json_schema=_read(self.json_schema),
            json_object=self.json_object,
            regex=self.regex,
            lark=_read(self.lark),
            choice=choice,
        )


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
