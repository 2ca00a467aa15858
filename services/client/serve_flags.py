"""Divides the arguments of `octavo serve` between the engine and the frontend."""

import difflib
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.client.service_flags import Flags, ServiceFlags
from services.client.vllm_flags import (
    ANSWERED,
    RENAMED,
    WITHOUT_EFFECT,
    Service,
    speculation_flags,
    value_here,
)

CHOSEN = ("engine-address",)
"""Flags of the services that `octavo serve` chooses."""


class ServeFlagError(ValueError):
    """An argument cannot be passed on; the message says what to write."""


@dataclass(slots=True, kw_only=True)
class Division:
    """The arguments by the service that gets them.

    models: folders, files or names on the hub; none for the embedded model. remarks: lines for the
    user about arguments that change nothing, or another thing than elsewhere.
    """

    models: list[str] = field(default_factory=list)
    engine: list[str] = field(default_factory=list)
    frontend: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def divide_arguments(
    arguments: Sequence[str], flags: ServiceFlags, *, models: Sequence[str] = ()
) -> Division:
    """Returns what each service gets of the arguments that are not the command's own.

    A word that belongs to no flag is a model.

    Args:
        arguments: the words of the command line, without the command's own flags.
        flags: the flags of the services.
        models: those of --model.

    Raises:
        ServeFlagError: a flag is unknown, has no value, or belongs to both services.
    """
    divider = _Divider(flags, arguments)
    divider.run()
    division = divider.division
    first = _one_word(divider.models)
    division.models = [*first, *(each for each in models if each not in first)]
    if divider.revision is not None:
        if len(division.models) != 1:
            raise ServeFlagError("--revision needs one model: OWNER/NAME@REVISION")
        division.models[0] += f"@{divider.revision}"
    if len(division.models) > 1 and divider.num_speculations > 1:
        raise ServeFlagError(
            "--speculative-config holds for all models: --speculative-method, --draft-model and "
            "--num-speculative-tokens can be given once for each"
        )
    try:
        division.engine += speculation_flags(divider.speculation)
    except ValueError as error:
        raise ServeFlagError(f"--speculative-config: {error}") from None
    return division


def _one_word(models: Sequence[str]) -> Sequence[str]:
    """Returns the model that needs no flag; more words are more likely values of a flag."""
    names = list(dict.fromkeys(models))
    if len(names) > 1:
        raise ServeFlagError(
            f"{' and '.join(names)} are {len(names)} models: --model gives each further one; a "
            "flag with several values takes them with commas between"
        )
    return names


class _Divider:
    """Goes through the arguments once."""

    def __init__(self, flags: ServiceFlags, arguments: Iterable[str]) -> None:
        self._flags: Mapping[Service, Flags] = {"engine": flags.engine, "frontend": flags.frontend}
        self._rest = deque(arguments)
        self.division = Division()
        self.models: list[str] = []
        self.revision: str | None = None
        self.speculation: dict[str, Any] = {}
        self.num_speculations = 0

    def run(self) -> None:
        """Sorts all arguments."""
        while self._rest:
            word = self._rest.popleft()
            if word.startswith("-"):
                self._take(_Flag.parse(word))
            else:
                self.models.append(word)

    def _take(self, flag: "_Flag") -> None:
        """Sorts a flag, and the value that follows it."""
        owners = [service for service in self._flags if self._has(service, flag.name)]
        if flag.name in CHOSEN:
            raise ServeFlagError(f"{flag.written}: `octavo serve` chooses it")
        if len(owners) > 1:
            shown = f"--{flag.name}={self._value(flag)}"
            raise ServeFlagError(
                f"{flag.written} is a flag of both services: write --engine-arg={shown}, "
                f"--frontend-arg={shown} or both"
            )
        if owners:
            self._pass_on(flag, [(owners[0], flag.name)])
        elif flag.base in RENAMED:
            self._pass_on(flag, RENAMED[flag.base])
        else:
            self._take_foreign(flag)

    def _take_foreign(self, flag: "_Flag") -> None:
        """Sorts a flag that neither service has."""
        if flag.base == "revision":
            self.revision = self._value(flag)
        elif flag.base == "speculative-config":
            self._read_speculation(flag)
        elif flag.base in ANSWERED:
            raise ServeFlagError(f"{flag.written}: {ANSWERED[flag.base]}")
        elif (plain := flag.base.removeprefix("no-")) in WITHOUT_EFFECT:
            has_value, reason = WITHOUT_EFFECT[plain]
            if has_value:
                self._value(flag)
            self.division.remarks.append(f"{flag.written} has no effect: {reason}")
        else:
            raise ServeFlagError(f"there is no flag {flag.written}{self._resembling(flag.name)}")

    def _has(self, service: Service, name: str) -> bool:
        flags = self._flags[service]
        return name in flags or flags.get(name.removeprefix("no-"), False)

    def _pass_on(self, flag: "_Flag", targets: Iterable[tuple[Service, str]]) -> None:
        """Gives a flag to the services that take it, under their names."""
        [(service, name), *_] = targets
        is_switch = self._flags[service].get(name, True)
        value = flag.value if is_switch else self._value(flag)
        for service, name in targets:
            arguments = self.division.engine if service == "engine" else self.division.frontend
            arguments += self._arguments(flag, name, value)

    def _arguments(self, flag: "_Flag", name: str, value: str | None) -> list[str]:
        """Returns a flag under its name here, with the value that it has here."""
        if value is None:
            return [f"--{name}"]
        try:
            here = value_here(name, value)
        except ValueError as error:
            raise ServeFlagError(f"{flag.written} {value}: {error}") from None
        if here is None:
            self.division.remarks.append(f"{flag.written} {value} has no effect: it is the default")
            return []
        return [f"--{name}={here}"]

    def _value(self, flag: "_Flag") -> str:
        """Returns a flag's value: what is attached to it, or the next word."""
        if flag.value is not None:
            return flag.value
        if not self._rest:
            raise ServeFlagError(f"{flag.written} needs a value")
        return self._rest.popleft()

    def _read_speculation(self, flag: "_Flag") -> None:
        """Collects --speculative-config, as JSON or field by field with dots."""
        value = self._value(flag)
        if flag.key:
            self.speculation[flag.key] = value
            return
        self.num_speculations += 1
        try:
            self.speculation |= json.loads(value)
        except (ValueError, TypeError):
            raise ServeFlagError(f"{flag.written} {value}: it must be a JSON object") from None

    def _resembling(self, name: str) -> str:
        """Returns a question that names a similar flag, if there is one."""
        known = [*self._flags["engine"], *self._flags["frontend"], *RENAMED, *WITHOUT_EFFECT]
        found = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        return f"; do you mean --{found[0]}?" if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag as it is written.

    name: without dashes in front, and with dashes for underscores. value: what follows "=".
    """

    written: str
    name: str
    value: str | None

    @classmethod
    def parse(cls, word: str) -> "_Flag":
        written, equals, value = word.partition("=")
        name = written.lstrip("-").replace("_", "-")
        return cls(written=written, name=name, value=value if equals else None)

    @property
    def base(self) -> str:
        """The name without a field of its JSON (--flag.field), and without a level (-O3)."""
        if self.written.startswith("-O"):
            return "O"
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        """The field of its JSON that the flag sets; empty if it sets all."""
        return self.written.partition(".")[2]
