"""EAGLE-3: one layer that guesses tokens from states of three layers of the model.

Its input joins a token's embedding with what the model, or the head itself, made of the token
before. Its vocabulary may be a part of the model's.
Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.eagle3_config import NUM_STATES, Eagle3Config
from models.kv_cache import CacheSpec
from models.layers.decoder import CausalLM
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.gated_mlp import GatedMLP
from models.layers.image_rows import ImageRows
from models.layers.linear import MergedColumnParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding, Rotation
from models.layers.rotary_heads import RotaryQKVLinear
from models.layers.self_attention import SelfAttention
from models.layers.weight import ExpertTensor
from models.parallel.group import SINGLE


class MidLayer(nn.Module):
    """The head's decoder layer; its attention reads embedding and state side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, 0, SINGLE)
        self.self_attn.qkv_proj = RotaryQKVLinear(
            2 * hidden,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            rope=config.rope,
            bias=config.attention_bias,
            group=SINGLE,
        )
        self.mlp = GatedMLP(config, SINGLE)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Maps T embeddings and states, [T, hidden] each, to the next states."""
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(joined, rotation)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(nn.Module):
    """The whole head, named as in checkpoints.

    d2t: [draft_vocab] int64, what is added to a guess to get the model's token.
    """

    packed_modules_mapping: ClassVar = CausalLM.packed_modules_mapping

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        self.config = layer
        self.aux_layers = config.aux_layers
        self.embed_tokens = VocabParallelEmbedding(
            layer.vocab_size, layer.hidden_size, group=SINGLE
        )
        self.image_rows = None if config.target.vision is None else ImageRows(0)
        self.fc = MergedColumnParallelLinear(
            NUM_STATES * layer.hidden_size, [layer.hidden_size], bias=False, group=SINGLE
        )
        self.midlayer = MidLayer(layer)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, layer.hidden_size, group=SINGLE)
        self.rotary = RotaryEmbedding(layer.head_dim, layer.max_position_embeddings, layer.rope)
        self.d2t: torch.Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    expert_tensors: ClassVar[Sequence[ExpertTensor]] = ()
    tied_weights: ClassVar[Mapping[str, str]] = {}

    @property
    def stored_module(self) -> nn.Module:
        """The module whose parameters have the names of a checkpoint."""
        return self

    def cache_specs(self) -> list[CacheSpec]:
        """Returns the layer's cache entry."""
        return [self.midlayer.self_attn.cache_spec]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Maps T tokens and the states before them, [T, hidden], to states."""
        embedded = self.embed_tokens(token_ids)
        if self.image_rows is not None:
            self.image_rows(embedded)
        states: torch.Tensor = self.midlayer(embedded, hidden, self.rotary(positions))
        return states

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Maps [S, hidden] to logits [S, vocab]; tokens that it cannot guess have -inf."""
        logits: torch.Tensor = self.lm_head(self.norm(states))
        token_ids = self.d2t + torch.arange(len(self.d2t), device=logits.device)
        full = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        return full.index_copy(1, token_ids, logits)


class Eagle3:
    """Guesses with a head; `models.deepseek_mtp.DeepseekMTP` says how it is called."""

    num_layers = 1
    keeps_position = False

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        self.run_steps: list[Callable[..., torch.Tensor]] = []

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Does nothing: guessing for all tokens of a step writes their entries."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Computes one guess for each of T tokens, [T, hidden].

        hidden: at depth 0 the model's output with the states of its layers, [T, 4 * hidden].
        """
        if depth == 0:
            width = NUM_STATES * self._head.config.hidden_size
            hidden = self._head.fc(hidden[:, -width:].contiguous())
        states: torch.Tensor = self._head(token_ids, positions, hidden)
        return states

    def compute_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to the logits of the tokens guessed, [S, vocab]."""
        del depth
        return self._head.compute_logits(hidden)

    def most_likely(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to the most likely of the tokens guessed, [S] int64."""
        return self.compute_logits(hidden, depth).argmax(dim=-1)
