"""Multi-token prediction: the layers after a model's last one, which guess tokens ahead.

A draft layer joins the model's output for a token with the token that followed it, and guesses the
next one. It shares the model's rotation, and its embedding and head unless the checkpoint has
others. GLM-4.5, Qwen3-Next and Qwen3.5 have the same form; the draft layers of MiMo-V2 and DeepSeek
V4 read the output of the model's last layer.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; Qwen's names and the order of
what is joined: vLLM, model_executor/models/qwen3_5_mtp.py at 01d9980.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config import ModelConfig
from models.layers.decoder import CausalLM, Decoder
from models.layers.draft_layer import DraftInputs, DraftLayer
from models.layers.embedding import ParallelLMHead
from models.layers.latent_attention import LatentAttention
from models.layers.moe import feed_forward
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


def _parts(
    config: ModelConfig, layer_index: int, group: ParallelGroup
) -> tuple[nn.Module, nn.Module]:
    """Returns attention and feed-forward part of a draft layer, which are as the model's."""
    attention: nn.Module
    if config.mla is not None:
        attention = LatentAttention(config, layer_index, group)
    else:
        has_head_norms = config.use_qk_norm
        attention = SelfAttention(config, layer_index, group, has_head_norms=has_head_norms)
    return attention, feed_forward(config, layer_index, group)


@support_torch_compile(dynamic_arg_dims={"token_ids": 0, "positions": 0, "hidden": 0})
class DraftStep(nn.Module):
    """One guess for each token: a draft layer and what it shares with the model."""

    def __init__(self, decoder: Decoder, layer: DraftInputs, *, has_window: bool) -> None:
        super().__init__()
        self.embed_tokens = layer.embed_tokens or decoder.embed_tokens
        self.image_rows = decoder.image_rows
        local = decoder.local_rotary if has_window else None
        self.rotary = decoder.rotary if local is None else local
        self.layer = layer

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Maps T token ids, their positions and the model's outputs [T, n] to outputs [T, n]."""
        embedded = self.embed_tokens(token_ids)
        if self.image_rows is not None:
            self.image_rows(embedded)
        joined = self.layer.join(embedded, hidden)
        return self.layer.finished(self.layer(joined, self.rotary(positions)))


class DeepseekMTP:
    """The draft layers of a model that was loaded with them.

    They run inside `models.forward_context.forward_context`, like the model. The cache of draft
    layer i is number num_hidden_layers + i.
    """

    keeps_position = False

    def __init__(self, model: CausalLM) -> None:
        """Takes the draft layers of a model.

        Raises:
            ValueError: it was loaded without.
        """
        decoder = model.model
        layers = list(decoder.layers)[model.config.num_hidden_layers :]
        if not layers:
            raise ValueError(f"{model.config.architecture} was loaded without draft layers")
        self.num_layers = len(layers)
        has_window = model.config.draft_window is not None
        self.steps = [
            DraftStep(decoder, cast("DraftInputs", layer), has_window=has_window)
            for layer in layers
        ]
        self.run_steps: list[Callable[..., torch.Tensor]] = list(self.steps)
        """The code of each step; compilation replaces it."""
        self._model = model

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Does nothing: guessing for all tokens of a step writes their entries."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Computes one guess for each of T tokens.

        token_ids: [T], each token's successor at depth 0, and the one `depth` further otherwise.
        positions: [T] int64, of the token itself, whose slots the layer's cache entries take.
        hidden: [T, n], output of the model or the previous draft layer for the token: its hidden
            state and, where DraftInputs.reads_last_layer, the last layer's output.
        depth: number of previous draft layers; past the last layer, that one runs again.

        Returns [T, n], for `compute_logits` and for the next depth.
        """
        return self.run_steps[self._number(depth)](token_ids, positions, hidden)

    def compute_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps outputs [S, n] of a depth to the logits of the tokens it guesses, [S, vocab]."""
        head = self._head(depth)
        return head.gathered(head(self._normed(hidden)))

    def most_likely(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps outputs [S, n] of a depth to the most likely of the tokens it guesses, [S] int64."""
        head = self._head(depth)
        logits: torch.Tensor = head(self._normed(hidden))
        if head.group.size == 1:
            return logits.argmax(dim=-1)
        return head.most_likely(logits).clamp(min=0)

    def _normed(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states of outputs, [S, hidden]."""
        return outputs[:, : self._model.config.hidden_size].contiguous()

    def _head(self, depth: int) -> ParallelLMHead:
        head = self.steps[self._number(depth)].layer.shared_head.head
        return self._model.lm_head if head is None else head

    def _number(self, depth: int) -> int:
        return min(depth, self.num_layers - 1)


def append_draft_layers(model: CausalLM, group: ParallelGroup) -> None:
    """Appends a model's draft layers to its layers, without weights.

    Raises:
        ConfigError: it has none that can be built.
    """
    config = model.config
    config.require_draft_layers()
    for number in range(config.num_draft_layers):
        index = config.num_hidden_layers + number
        own = model.make_draft_layer(index, group)
        model.model.layers.append(own or DraftLayer(config, _parts(config, index, group), group))
    if any(getattr(layer, "reads_last_layer", False) for layer in model.model.layers):
        model.model.aux_layers = (config.num_hidden_layers - 1,)
