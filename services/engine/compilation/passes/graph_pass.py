"""The interface of compiler passes."""

import functools
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch.fx import Graph, Node

from services.engine.compilation.program.compile_range import CompileRange


class GraphPass(ABC):
    """Rewrites parts of a traced graph, in place.

    A pattern names operators, so it limits a pass to their number formats, and to ranks between
    which these exchange nothing.
    """

    name: ClassVar[str]

    @functools.cached_property
    def uuid(self) -> str:
        """A digest of the pass's sources and settings, part of the key of compiled pieces."""
        settings = json.dumps([self.name, dict(self.settings)], sort_keys=True)
        content = b"".join(path.read_bytes() for path in self.sources)
        return hashlib.sha256(settings.encode() + content).hexdigest()

    @property
    def sources(self) -> Sequence[Path]:
        """The files that define the pass; shared helpers are in the key of every piece."""
        return [Path(inspect.getfile(type(self)))]

    @property
    def settings(self) -> Mapping[str, int]:
        """The settings that change what the pass does."""
        return {}

    def is_applicable_for_range(self, compile_range: CompileRange) -> bool:
        """Whether the pass gains anything for these numbers of tokens."""
        del compile_range
        return True

    @abstractmethod
    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were.

        Args:
            graph: traced by Dynamo; its nodes have fake tensors. It stays valid.
        """


class NodePass(GraphPass):
    """A pass that looks at one node after the other."""

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        return sum(map(self._fuse, graph.nodes))

    @abstractmethod
    def _fuse(self, node: Node) -> bool:
        """Rewrites the match that ends at a node, if there is one."""
