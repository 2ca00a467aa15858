"""The part of a transformers' network after its decoder."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from models.layers.embedding import ParallelLMHead
from models.parallel.group import SINGLE


class LanguageModelHead(ParallelLMHead):
    """The head of a network, and what scales, caps or shifts its logits.

    It runs the network's own forward with hidden states in place of the decoder.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        nn.Module.__init__(self)
        self.group = SINGLE
        self.vocab_size = network.config.vocab_size
        headed = copy.copy(network)
        headed._modules = {**network._modules, network.base_model_prefix: _Given()}
        # A tuple keeps its parameters, which are the model's, from counting twice.
        self._networks = (headed,)

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab], of the hidden states' dtype; there are no adapters."""
        del slots
        (network,) = self._networks
        output = network(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: torch.Tensor = output.logits.squeeze(0)
        return logits.to(hidden.dtype)


class _Given(nn.Module):
    """Takes the place of a decoder and returns the hidden states that it is given."""

    @property
    def decoder(self) -> "_Given":
        """Itself: networks with one wrapper more call the decoder inside of it."""
        return self

    def forward(
        self, *args: object, inputs_embeds: torch.Tensor, **options: object
    ) -> "_GivenOutput":
        del args, options
        return _GivenOutput(last_hidden_state=inputs_embeds)


class _GivenOutput(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """Hidden states, and None for all that decoders return besides them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
