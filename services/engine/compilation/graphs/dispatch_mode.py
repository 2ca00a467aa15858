"""A typed base of modes that see every operation of torch."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """torch's dispatch mode, with types; subclasses define `dispatch`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # torch has no types here

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation in its place and returns the result; each mode has its own."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing Dynamo, which takes 2 s, only to exclude this method."""
        return False
