"""One forward pass of the model over the worker's input buffers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import (
    AttentionMetadata,
    Context,
    DPMetadata,
    ForwardContext,
    GraphKey,
    ImageMetadata,
    SpecDecodeMetadata,
    forward_context,
)
from models.kv_cache import CacheData
from models.layers.drafting import DraftingModel
from models.ops.attention.attention_metadata import (
    build_attention_metadata,
    build_state_metadata,
    make_attention_workspace,
)
from models.state_cache import StateCacheData, StateSpec, copy_blocks
from services.engine.kv_cache.cache_groups import STATE, LayerGroup
from services.engine.worker.inputs.adapter_slots import AdapterSlots
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.dummy_steps import dummy_hidden
from services.engine.worker.inputs.image_inputs import ImageInputs
from services.engine.worker.inputs.input_buffers import Inputs
from services.engine.worker.inputs.prefix_plan import PrefixBuffers


class ForwardPass:
    """Runs the model with its forward context set."""

    def __init__(
        self,
        model: DraftingModel,
        kv_cache_data: list[CacheData],
        *,
        block_table: Tensor,
        block_size: int,
        groups: Sequence[LayerGroup] = (),
        state_pages: int = 0,
        num_state_slots: int = 1,
        prefixes: PrefixBuffers | None = None,
    ) -> None:
        self.run_model = cast("Callable[..., Tensor]", model)
        """Computes hidden states; compilation and capture replace it."""
        self.kv_cache_data = kv_cache_data
        """Each layer's cache."""
        self.received: Tensor | None = None
        """The hidden states [max_num_batched_tokens, hidden] of the pipeline stage before, which
        the model takes for input ids; None on the first stage."""
        self.dp_metadata: DPMetadata | None = None
        """The tokens of each data-parallel rank; None where there is one, and for a small model."""
        self.draft_dp_metadata: DPMetadata | None = None
        """The same in draft passes of one token of each request that samples."""
        self.adapters: AdapterSlots | None = None
        """The slot of each token's adapter; None of a model without room for some."""
        self.sees_later = False
        """Whether tokens see later ones of their sequences, all of which a step computes."""
        self.images: ImageInputs | None = None
        """Encoded images, of a model that sees some and of its head; None for a small model."""
        # The entries of groups with tokens alternate; those of states follow.
        num_state_groups = sum(group.window == STATE for group in groups)
        num_groups = max(1, len(groups)) - num_state_groups
        table_width = state_pages * num_state_slots
        width = block_table.shape[1] - num_state_groups * table_width
        tokens, states = block_table[:, :width], block_table[:, width:]
        self._block_tables = [tokens[:, group::num_groups] for group in range(num_groups)]
        self._state_tables = [
            states[:, group * table_width : (group + 1) * table_width]
            for group in range(num_state_groups)
        ]
        self._group_of_layer = {
            layer: number for number, group in enumerate(groups) for layer in group.layers
        }
        self._block_size = block_size
        self._block_strides = [1]
        if groups:
            # A pipeline stage may have no layer of a group.
            layers = [group.layers[:1] for group in groups if group.window != STATE]
            self._block_strides = [
                max((getattr(kv_cache_data[each], "block_stride", 1) for each in first), default=1)
                for first in layers
            ]
        specs = [spec for spec in model.cache_specs() if not isinstance(spec, StateSpec)]
        self._workspace = None
        if specs:
            self._workspace = make_attention_workspace(
                specs, device=block_table.device, shares_prefixes=prefixes is not None
            )
        self._prefixes = prefixes

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The tensors that a whole graph reads besides the input buffers, by name."""
        received = {} if self.received is None else {"received": self.received}
        if self.adapters is not None:
            received["adapter_slots"] = self.adapters.memory
        return received | ({} if self.images is None else self.images.fixed)

    def __call__(self, inputs: Inputs, key: GraphKey | None = None) -> Tensor:
        """Returns the hidden states of all input ids, padding included: [n, hidden].

        Args:
            inputs: T tokens of R requests. input_ids and positions may be longer than
                token_request; this padding writes no key and no value.
            key: the graph to record or to replay; None for neither.
        """
        first = inputs.input_ids
        if self.received is not None:
            first = self.received[: len(first)]
        with self.context(inputs, key):
            return self.run_model(first, inputs.positions)

    @contextmanager
    def context(
        self,
        inputs: Inputs,
        key: GraphKey | None = None,
        spec_decode_metadata: SpecDecodeMetadata | None = None,
        *,
        has_single_tokens: bool = False,
    ) -> Iterator[None]:
        """Sets the forward context of a step for the length of the block.

        has_single_tokens: whether it is a draft pass of one token of each request that samples.
        """
        num_tokens = len(inputs.token_request)
        mode = key.kind.runtime_mode if key else CUDAGraphMode.NONE
        prefixes = self._prefixes
        prefix_plan = None
        if prefixes is not None and spec_decode_metadata is None:
            # Draft layers have other queries.
            prefix_plan = prefixes.plan(inputs.seq_lens, key)
        group_metadata = [
            build_attention_metadata(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                row_ids=inputs.row_ids,
                block_table=block_table,
                positions=inputs.positions[:num_tokens],
                token_request=inputs.token_request,
                block_size=self._block_size,
                max_seqlen_q=inputs.max_seqlen_q,
                max_seqlen_k=inputs.max_seqlen_k,
                chunks=inputs.chunks,
                workspace=self._workspace,
                is_recorded=mode is CUDAGraphMode.FULL,
                block_stride=block_stride,
                prefix_plan=prefix_plan,
            )
            for block_table, block_stride in zip(
                self._block_tables, self._block_strides, strict=True
            )
        ]
        group_metadata += [
            build_state_metadata(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                row_ids=inputs.row_ids,
                pages=pages,
                max_seqlen_q=inputs.max_seqlen_q,
                max_seqlen_k=inputs.max_seqlen_k,
            )
            for pages in self._state_tables
        ]
        context = ForwardContext(
            context=Context(
                positions=inputs.positions,
                is_prefill=inputs.is_prefill,
                batch_size=len(inputs.seq_lens),
                num_tokens=num_tokens,
                max_q_len=inputs.max_seqlen_q,
            ),
            attn_metadata=group_metadata[0],
            layer_attn_metadata=self._by_layer(group_metadata),
            kv_cache_data=self.kv_cache_data,
            dp_metadata=self.draft_dp_metadata if has_single_tokens else self.dp_metadata,
            spec_decode_metadata=spec_decode_metadata,
            image_metadata=self._image_metadata(
                inputs,
                key,
                has_single_tokens=has_single_tokens,
                is_draft=spec_decode_metadata is not None,
            ),
            adapter_slots=self.slots(key),
            sequence_ends=self._sequence_ends(inputs),
            batch_descriptor=key,
            cudagraph_runtime_mode=mode,
        )
        with forward_context(context):
            yield

    def adding_adapters(self) -> AbstractContextManager[None]:
        """Has steps in the block run with adapters, whatever they use, where there is room."""
        return nullcontext() if self.adapters is None else self.adapters.building_kernels()

    def slots(self, key: GraphKey | None = None) -> Tensor | None:
        """Returns adapter_slots of the forward context of a step, or of its graph."""
        return None if self.adapters is None else self.adapters.of_step(key)

    def _sequence_ends(self, inputs: Inputs) -> Tensor | None:
        # A sequence of one token has no later ones, so whole graphs of these need none.
        if not self.sees_later or inputs.max_seqlen_q == 1:
            return None
        return inputs.seq_lens.index_select(0, inputs.token_request)

    def _image_metadata(
        self, inputs: Inputs, key: GraphKey | None, *, has_single_tokens: bool, is_draft: bool
    ) -> ImageMetadata | None:
        if self.images is None:
            return None
        is_decode = key is not None and key.kind in (GraphKind.DECODE, GraphKind.DRAFT)
        return self.images.metadata(
            inputs.positions,
            inputs.row_ids.index_select(0, inputs.token_request),
            are_decodes=is_decode or has_single_tokens,
            is_recorded=key is not None,
            is_draft=is_draft,
        )

    def _by_layer(
        self, group_metadata: Sequence[AttentionMetadata]
    ) -> tuple[AttentionMetadata, ...]:
        """Returns each layer's metadata; empty if all are equal."""
        if len(group_metadata) == 1:
            return ()
        groups = self._group_of_layer
        return tuple(group_metadata[groups[layer]] for layer in range(len(groups)))

    def copy_states(self, blocks: Tensor) -> None:
        """Copies blocks of all layers that keep states: [2, n] int32 or int64, from and to.

        All are read before any is written.
        """
        copy_blocks(self.state_memory, blocks)

    def state_table(self, entry: int) -> Tensor:
        """Returns the pages of all rows' states in a cache entry, [rows, slots * P]."""
        first = len(self._block_tables)
        return self._state_tables[self._group_of_layer[entry] - first]

    @cached_property
    def state_memory(self) -> list[Tensor]:
        """The memory of layers that keep states, each part once."""
        states = [each for each in self.kv_cache_data if isinstance(each, StateCacheData)]
        return list({each.memory.data_ptr(): each.memory for each in states}.values())

    def reset_for(self, batch: Batch) -> None:
        """Resets what passes over dummy requests read, so that they repeat their results.

        That is the null block, what tokens take from images and, after the first stage, the hidden
        states of the stage before.
        """
        if self.images is not None:
            self.images.write(batch)
        if self.received is not None:
            positions = torch.from_numpy(batch.positions).to(self.received.device)
            states = dummy_hidden(positions, self.received.shape[1])
            self.received[: len(states)] = states
            self.received[len(states) :].zero_()
        blocks, fillings = self._null_block
        if blocks:
            torch._foreach_copy_(blocks, fillings)

    @cached_property
    def _null_block(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the null block of all layers and its reset content."""
        # Dummy requests have no state: layers that keep some leave the null block alone.
        blocks: dict[int, Tensor] = {}
        for layer in self.kv_cache_data:
            if isinstance(layer, StateCacheData):
                continue
            for block in (tensor[0] for tensor in layer.tensors().values()):
                # Layers of several groups share memory. They are filled at once, so by one of them.
                known = blocks.setdefault(block.data_ptr(), block)
                if block.nbytes > known.nbytes:
                    blocks[block.data_ptr()] = block
        # Varied values: a kernel that reads the wrong ones, or none, changes the result.
        fillings = {
            (block.shape, block.dtype): torch.linspace(-1, 1, block.numel(), device=block.device)
            .view(block.shape)
            .to(block.dtype)
            for block in blocks.values()
        }
        filled = list(blocks.values())
        return filled, [fillings[block.shape, block.dtype] for block in filled]
