"""One forward pass of the model over inputs that lie in the worker's buffers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import (
    AttentionMetadata,
    Context,
    ForwardContext,
    GraphKey,
    forward_context,
)
from models.kv_cache import CacheData
from models.layers.decoder import CausalLM
from models.ops.attention.attention_metadata import (
    build_attention_metadata,
    make_attention_workspace,
)
from services.engine.kv_cache.cache_groups import LayerGroup
from services.engine.worker.inputs.input_buffers import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What a forward pass is told beside its tensors.

    graph_key: the graph to record or to replay; its sizes are those that the model sees.
    is_recorded: the pass is recorded as a whole, so nothing may depend on what tensors hold.
    """

    is_prefill: bool
    max_seqlen_q: int
    max_seqlen_k: int
    is_draft: bool = False
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    graph_key: GraphKey | None = None
    is_recorded: bool = False


class ForwardPass:
    """Runs the model with its forward context set."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache_data: list[CacheData],
        *,
        block_table: Tensor,
        block_size: int,
        groups: Sequence[LayerGroup] = (),
    ) -> None:
        self.run_model: Callable[..., Tensor] = model
        """What computes hidden states; whoever compiles or captures the model puts that here."""
        self.kv_cache_data = kv_cache_data
        """Each layer's cache."""
        # Entries of the groups stand side by side.
        num_groups = max(1, len(groups))
        self._block_tables = [block_table[:, group::num_groups] for group in range(num_groups)]
        self._group_of_layer = {
            layer: number for number, group in enumerate(groups) for layer in group.layers
        }
        self._block_size = block_size
        # Layers differ in how much they cache, not in how they attend.
        self._workspace = make_attention_workspace(
            model.cache_specs()[0], device=block_table.device
        )

    def __call__(self, inputs: StepInputs, shape: PassShape) -> Tensor:
        """Returns the hidden states, [T, hidden] or, with a graph, [graph_key.num_tokens, hidden].

        Args:
            inputs: T tokens of R requests. input_ids and positions may be longer than
                token_request: what stands behind is padding and writes no key and no value.
            shape: the rest.
        """
        with self.context(inputs, shape):
            return self.run_model(inputs.input_ids, inputs.positions)

    @contextmanager
    def context(self, inputs: StepInputs, shape: PassShape) -> Iterator[None]:
        """Lets layers run over a step's inputs, for the length of the block."""
        num_tokens, batch_size = len(inputs.token_request), len(inputs.seq_lens)
        group_metadata = [
            build_attention_metadata(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                row_ids=inputs.row_ids,
                block_table=block_table,
                positions=inputs.positions[:num_tokens],
                token_request=inputs.token_request,
                block_size=self._block_size,
                max_seqlen_q=shape.max_seqlen_q,
                max_seqlen_k=shape.max_seqlen_k,
                workspace=self._workspace,
                is_recorded=shape.is_recorded,
            )
            for block_table in self._block_tables
        ]
        key = shape.graph_key
        context = ForwardContext(
            context=Context(
                positions=inputs.positions,
                is_prefill=shape.is_prefill,
                batch_size=batch_size,
                graph_bs=key.graph_bs if key and key.kind is GraphKind.DECODE else batch_size,
                num_tokens=num_tokens,
                max_q_len=shape.max_seqlen_q,
                is_draft=shape.is_draft,
            ),
            attn_metadata=group_metadata[0],
            layer_attn_metadata=self._by_layer(group_metadata),
            kv_cache_data=self.kv_cache_data,
            batch_descriptor=key,
            cudagraph_runtime_mode=shape.mode,
        )
        with forward_context(context):
            yield

    def _by_layer(
        self, group_metadata: Sequence[AttentionMetadata]
    ) -> tuple[AttentionMetadata, ...]:
        """Returns each layer's metadata; nothing if all have the same."""
        if len(group_metadata) == 1:
            return ()
        groups = self._group_of_layer
        return tuple(group_metadata[groups[layer]] for layer in range(len(groups)))

    def refill_null_block(self) -> None:
        """Gives the null block the same content again, for passes that shall compute the same.

        Nothing that serves a request reads it.
        """
        blocks, fillings = self._null_block
        torch._foreach_copy_(blocks, fillings)

    @cached_property
    def _null_block(self) -> tuple[list[Tensor], list[Tensor]]:
        """All that the null block has, and what it is filled with."""
        blocks = [tensor[0] for layer in self.kv_cache_data for tensor in layer.tensors().values()]
        # Not all the same: what is read there by mistake, or not read, shall be seen.
        fillings = {
            (block.shape, block.dtype): torch.linspace(-1, 1, block.numel(), device=block.device)
            .view(block.shape)
            .to(block.dtype)
            for block in blocks
        }
        return blocks, [fillings[block.shape, block.dtype] for block in blocks]
