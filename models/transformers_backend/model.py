"""A decoder of transformers, as the engine runs its own families."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from models.config import ModelConfig
from models.config_sections.multipliers import Multipliers
from models.config_sections.rope import RopeConfig
from models.kv_cache import CacheSpec, KVCacheSpec
from models.layers.decoder import CausalLM
from models.layers.weight import ExpertTensor
from models.parallel.group import ParallelGroup
from models.transformers_backend.attention_calls import AttentionCall
from models.transformers_backend.head import LanguageModelHead
from models.transformers_backend.network import NetworkSource, undecorated_forward
from models.transformers_backend.own_layers import use_own_layers

_NUMBER = "*"


class TransformersForCausalLM(CausalLM):
    """A network of transformers with our attention."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {}
    expert_names: ClassVar[tuple[str, str, str] | None] = None

    def __init__(
        self, config: ModelConfig, network: PreTrainedModel, calls: Sequence[AttentionCall]
    ) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.visual = self.pooling = None
        self.draft_models = ()
        self.num_adapter_slots = self.max_adapter_rank = 0
        self.network = network
        self._calls = tuple(calls)
        self._prefix = network.base_model_prefix
        self._decode = undecorated_forward(network)
        self.lm_head = LanguageModelHead(network)
        self._renames = [
            each
            for each in get_model_conversion_mapping(network)
            if isinstance(each, WeightRenaming)
        ]
        self._stacks = list(stacked_experts(network))
        self._names = frozenset(
            name for name, _ in network.named_parameters(remove_duplicate=False)
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids at [T] int64 positions to [T, hidden]."""
        output = self._decode(
            self.network.base_model,
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    @property
    def output_size(self) -> int:
        """Elements of a token's output: its hidden state."""
        return self.config.hidden_size

    def local_logits(
        self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab]; there are no adapters."""
        del adapter_slots
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def expected_passes(self) -> Collection[str]:
        """Returns no compiler pass: what occurs depends on the network."""
        return ()

    def cache_specs(self) -> list[CacheSpec]:
        """Returns each layer's cache entry."""
        return [
            KVCacheSpec(
                num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, head_dim=call.cached_dim
            )
            for call in self._calls
        ]

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """No layers: a network may compute each with its own values, so all are traced."""
        return []

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        dtype: torch.dtype = self.network.dtype
        return dtype

    @property
    def stored_module(self) -> nn.Module:
        """The module whose parameters have the names of a checkpoint."""
        network: nn.Module = self.network
        return network

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """Tensor that repeats another -> the other."""
        ties: Mapping[str, str] = self.network.all_tied_weights_keys
        return ties

    @property
    def expert_tensors(self) -> Sequence[ExpertTensor]:
        """Where the tensors of single experts go."""
        return self._stacks

    @property
    def num_loaded_layers(self) -> int:
        """The number of layers: draft layers are not loaded."""
        return self.config.num_hidden_layers

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name in the network.

        Older checkpoints have other names, and those of a bare decoder lack the first part.
        """
        for rename in self._renames:
            name, _ = rename.rename_source_key(name)
        prefix = f"{self._prefix}."
        if name not in self._names:
            for other in (prefix + name, name.removeprefix(prefix)):
                if other in self._names:
                    return other
        return name

    def is_unused(self, name: str) -> bool:
        """Returns whether a stored tensor only repeats another part of the model."""
        if name in self.tied_weights:
            return True
        ignored = self.network._keys_to_ignore_on_load_unexpected or ()
        return (
            name in dict(self.network.named_buffers())
            or name.endswith("rotary_emb.inv_freq")
            or any(re.search(pattern, name) for pattern in ignored)
        )


def read_transformers_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json as transformers does, and tries the network without memory.

    Raises:
        ConfigError: config.json cannot be read, or our attention does not serve the network.
    """
    source = NetworkSource.read(folder)
    probed = source.probe()
    first = next(iter(probed.calls.values()))
    config = source.config
    return ModelConfig(
        architecture=source.architecture,
        vocab_size=config.vocab_size,
        hidden_size=probed.hidden_size,
        intermediate_size=_inner_size(config) or 4 * probed.hidden_size,
        num_hidden_layers=len(probed.calls),
        num_attention_heads=first.num_heads,
        num_key_value_heads=first.num_kv_heads,
        head_dim=first.cached_dim,
        rms_norm_eps=0.0,
        rope=RopeConfig(theta=1.0),
        local_rope=None,
        hidden_act="silu",
        norm_offset=0.0,
        multipliers=Multipliers(),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        use_qk_norm=False,
        sliding_windows=_cached_windows(list(probed.calls.values())),
        dtype=source.dtype,
        eos_token_ids=source.eos_token_ids,
        quantization=source.quantization,
        transformers=source.facts(),
    )


def _inner_size(config: PretrainedConfig) -> int | None:
    """Returns the inner size of feed-forward layers, the largest where each has its own."""
    size = getattr(config, "intermediate_size", None)
    return max(size, default=None) if isinstance(size, (list, tuple)) else size


def _cached_windows(calls: Sequence[AttentionCall]) -> tuple[int | None, ...]:
    """Returns each layer's window as the cache sees it.

    Groups of layers share blocks, so layers that cache different sizes form one group, which keeps
    all keys; attention looks through the window either way.
    """
    if len({(call.num_kv_heads, call.cached_dim) for call in calls}) > 1:
        return (None,) * len(calls)
    return tuple(call.sliding_window for call in calls)


def build_transformers_model(
    folder: Path, config: ModelConfig, group: ParallelGroup, dtype: torch.dtype
) -> TransformersForCausalLM:
    """Returns the model without its weights; torch's current modes make its parameters.

    Raises:
        ConfigError: as for `read_transformers_config`.
        ValueError: the group has several ranks.
    """
    if group.size > 1:
        raise ValueError(
            f"{config.architecture} runs as transformers' modules, which {group.size} ranks "
            "cannot share"
        )
    source = NetworkSource.read(folder)
    calls = source.probe().calls
    network = source.build(calls, dtype)
    use_own_layers(network)
    return TransformersForCausalLM(config, network, list(calls.values()))


def stacked_experts(network: PreTrainedModel) -> Iterator[ExpertTensor]:
    """Yields where the tensors of single experts go, for parameters [E, N, K] of all experts.

    Conversions of another kind are left out: loading then names the first tensor that fits nowhere.
    """
    parameters = dict(network.named_parameters())
    for converter in get_model_conversion_mapping(network):
        if not isinstance(converter, WeightConverter) or not _stacks(converter):
            continue
        # Some patterns begin with a dot.
        (target,) = (each.strip(".") for each in converter.target_patterns)
        sizes = {len(each) for name, each in parameters.items() if name.endswith(f".{target}")}
        for expert in range(max(sizes, default=0)):
            for part, source in enumerate(converter.source_patterns):
                name = source.strip(".").replace(_NUMBER, str(expert))
                yield ExpertTensor(target, name, expert, part)


def _stacks(converter: WeightConverter) -> bool:
    """Returns whether a conversion stacks experts whose parts follow each other in rows."""
    kinds = [type(each) for each in converter.operations]
    dims = [getattr(each, "dim", None) for each in converter.operations]
    has_several = len(converter.source_patterns) > 1
    expected = [MergeModulelist, Concatenate] if has_several else [MergeModulelist]
    return (
        kinds == expected
        and dims == list(range(len(dims)))
        and len(converter.target_patterns) == 1
        and all(source.count(_NUMBER) == 1 for source in converter.source_patterns)
    )
