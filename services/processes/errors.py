"""Errors of a question to a helper process.

HelperError
├── HelperUnavailableError   no process could be started, or it was killed from outside; try again
├── HelperBusyError          all processes were busy with other questions; try again
├── HelperOpeningError       the process refuses its opening message; no question can be asked
├── HelperRefusalError       the process refuses this question
└── HelperBrokenError        this question made the process hang, crash or answer nonsense
"""


class HelperError(Exception):
    """A question to a helper process has no answer."""


class HelperUnavailableError(HelperError):
    """No process could be started, or it was killed from outside. The question may be repeated."""


class HelperBusyError(HelperError):
    """No process was free in time."""


class HelperOpeningError(HelperError):
    """The process refuses its opening message; the text is the process's own."""


class HelperRefusalError(HelperError):
    """The process refuses the question; the text is the process's own."""


class HelperBrokenError(HelperError):
    """The question ended its process: "took over 2 s" or "broke down"."""
