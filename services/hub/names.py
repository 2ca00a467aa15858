"""Distinguishes names on the hub from folders of checkpoints."""

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)


class HubError(Exception):
    """A model cannot be taken from the hub; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub; revision: a branch, a tag or a commit, None for the main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        """Returns the name as a flag takes it."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Reads OWNER/NAME or OWNER/NAME@REVISION.

        Raises:
            HubError: the text has another form.
        """
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            raise HubError(f"{text} is no name on the hub; one looks like OWNER/NAME[@REVISION]")
        return cls(match["repository"], match["revision"])


def hub_name(model: str | Path) -> HubName | None:
    """Returns the name that `model` is; None if it is a path.

    A local folder wins over a model of the same name. A path that begins with /, . or ~ is never
    a name.
    """
    text = str(model)
    if Path(text).exists():
        return None
    try:
        return HubName.parse(text)
    except HubError:
        return None
