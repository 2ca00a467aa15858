"""The served models by name: one, or several that share a card."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from services.frontend.access.gate import Gate
from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.pool import EnginePool
from services.frontend.engine_client.tokenizer_files import TokenizerFiles
from services.frontend.errors import EngineUnavailableError, UnknownModelError
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.text.tokenizer import TokenizerFilesError

MAX_SHOWN_CHARACTERS = 128
"""Characters of a model name shown in an error."""


class ServedModels:
    """Loads the models that engines serve, and finds them by the names in requests."""

    def __init__(
        self,
        engine: EnginePool,
        gate: Gate,
        load: Callable[[ModelInfo, TokenizerFiles], Awaitable[ServedModel]],
    ) -> None:
        """Has no model before `load`.

        Args:
            engine: the engines.
            gate: checks which adapters a caller may use.
            load: loads the text of a model; raises TokenizerFilesError.
        """
        self._engine = engine
        self._gate = gate
        self._load = load
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    @property
    def all(self) -> list[ServedModel]:
        """The models, asleep or not, in the order of their names; none before a connection."""
        return [self._models[name] for name in sorted(self._models)]

    @property
    def max_prompt_tokens(self) -> int:
        """Number of token ids from which a prompt is refused before it is read."""
        infos = [model.info for model in self._models.values()]
        # The vector of a prompt takes no room in the context.
        limits = [info.max_model_len + info.HasField("pooling") for info in infos]
        return max(limits, default=MAX_PROMPT_TOKENS)

    def adapter_names(self, model: ServedModel) -> list[str]:
        """Returns the names of a model's adapters that the acting caller may use, in order."""
        return sorted(filter(self._gate.may_use_adapter, self._engine.adapters(model.info.model)))

    async def load(self, info: ModelInfo, files: TokenizerFiles) -> None:
        """Loads the model of an engine; the `on_model` handler of `EnginePool.run`.

        Raises:
            EngineUnavailableError: its tokenizer cannot be used.
        """
        async with self._loading:  # engines may connect at the same time; one load serves all
            is_alone = self._engine.swapper is None
            known = next(iter(self.all), None) if is_alone else self._models.get(info.model)
            if known is None or not known.has_same_text(info):
                try:
                    new = await self._load(info, files)
                except TokenizerFilesError as error:
                    raise EngineUnavailableError(str(error)) from None
                if known is not None:
                    await known.close()
                known = new
            if is_alone:
                self._models.clear()
            self._models[info.model] = dataclasses.replace(known, info=info)

    def named(self, name: str) -> ServedModel:
        """Returns the model or adapter that a request names; an empty name means the only model.

        Raises:
            EngineUnavailableError: no engine has connected yet, or a model has none now that could
                say whether it has an adapter of this name.
            UnknownModelError: another model is served, several are and the name is empty, or the
                caller may not use the adapter.
        """
        if not self._models:
            raise self._engine.unavailable
        if name in self._models:
            return self._models[name]
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        # Both are found out, so that a forbidden adapter is refused like an unknown one.
        found = [(each, self._engine.adapter_digest(name, each.info.model)) for each in self.all]
        is_allowed = self._gate.may_use_adapter(name)
        for model, digest in found:
            if digest is not None and is_allowed:
                return dataclasses.replace(model, adapter=name, adapter_digest=digest)
        if name and not all(self._engine.lists_adapters(each.info.model) for each in self.all):
            raise self._engine.unavailable
        served = ", ".join(map(repr, sorted(self._models)))
        missing = f"the model {_shown(name)} is not served" if name else "no model is named"
        end = "is" if self._engine.swapper is None else "share a card"
        raise UnknownModelError(f"{missing}; {served} {end}")

    async def close(self) -> None:
        """Ends the processes of all models."""
        for model in self._models.values():
            await model.close()


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}...")
