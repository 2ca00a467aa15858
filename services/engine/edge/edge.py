"""The parts of an engine that the methods of all its protocols share."""

from dataclasses import dataclass
from typing import Any

import grpc

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.open_streams import OpenStreams, write_in_time
from services.engine.edge.request_reader import RequestReader
from services.engine.grammar.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class Edge:
    """The engine as its services see it: they share its checks and its limits."""

    core: EngineCore
    model: ModelFolder
    config: EngineConfig
    grammars: GrammarCompiler
    streams: OpenStreams
    reader: RequestReader

    async def write(self, context: "grpc.aio.ServicerContext[Any, Any]", message: Any) -> None:
        """Writes a message of a stream.

        Raises:
            SlowReaderError: the caller did not read it in time.
        """
        await write_in_time(context, message, self.config.serving.slow_reader_timeout_s)
