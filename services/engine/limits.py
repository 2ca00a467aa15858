"""Limits of steps, which the scheduler keeps and the worker's tables have room for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.engine.config.engine_config import EngineConfig
from services.engine.config.images import pages_of
from services.engine.kv_cache.cache_groups import (
    STATE,
    CacheGroups,
    LayerGroup,
    Window,
    group_layers,
)
from services.engine.kv_cache.state_blocks import StateBlocks
from services.engine.spec_decode.draft_length import lengths_between

LEAST_SHARING_REQUESTS = 4
"""Fewest requests whose common prefix attention reads once; steps of fewer have no plan of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Sizes that bound a step, a sequence and a block of the KV cache."""

    max_num_seqs: int
    """Rows of the worker's tables, hence most requests in one step."""
    max_num_batched_tokens: int
    """Most query tokens in one step."""
    max_num_mixed_tokens: int | None = None
    """Most query tokens in one step while requests decode; None: as in any step."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    block_size: int
    """Tokens in one block."""
    vocab_size: int
    layer_groups: tuple[LayerGroup, ...] = ()
    """The model's layers by the blocks that they keep; empty: they are one group."""
    state_pages: int = 0
    """Blocks of a state in each group of states; 0 until a worker says so, or without states."""
    num_speculative_tokens: int = 0
    """Draft tokens of each request in a step; 0 without speculative decoding."""
    min_speculative_tokens: int | None = None
    """Fewest draft tokens; None means num_speculative_tokens."""
    lookup_sizes: tuple[int, int] | None = None
    """The shortest and the longest n-gram that the scheduler looks up; None: the worker drafts."""
    has_draft_model: bool = False
    """Whether a small model makes the drafts."""
    num_encoder_pages: int = 0
    """Pages of the table of encoded images; 0 where the model sees none."""
    max_encoder_tokens: int = 0
    """Most vectors of images that a step encodes; a larger image is encoded alone."""
    max_whole_tokens: int = 0
    """Most tokens of an image, which one step computes as they attend to later ones; 0: chunks of
    prompts may end inside of images."""
    computes_whole_prompts: bool = False
    """Whether a step computes all of a prompt or none, as its tokens attend to later ones."""
    pooling: str | None = None
    """The method of pooling (last, mean or cls) where requests get vectors; None: tokens."""
    shared_prefix_tokens: int | None = 0
    """Tokens that a prefix must save if attention reads it once for all requests that share it; 0:
    no prefix is. None until a worker says so, by the tables of its GPU."""
    num_adapter_slots: int = 0
    """Adapters that requests of one step may use; 0 without any."""
    num_adapter_ranks: int = 1
    """Ranks that share the layers with adapters."""
    num_stages: int = 1
    """Pipeline stages, which run as many steps at a time."""
    data_parallel_size: int = 1
    """Ranks with requests of their own, which run their steps together."""

    @classmethod
    def of(  # noqa: PLR0913  # each is a fact of a model that is not loaded here
        cls,
        config: EngineConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        cache_windows: Sequence[Window],
        cache_spans: Sequence[int] = (),
        sees_images: bool = False,
        max_whole_tokens: int = 0,
        computes_whole_prompts: bool = False,
        pooling: str | None = None,
    ) -> "StepLimits":
        """Returns the limits of an engine that serves a model.

        cache_windows: what each cache entry of the model keeps, as in `ModelConfig`.
        cache_spans: how much larger its blocks are, as there.
        sees_images: whether an encoder is loaded.
        max_whole_tokens: of that encoder's configuration.
        computes_whole_prompts: whether the model's tokens attend to later ones.
        pooling: the method of pooling; None to generate.
        """
        layer_groups = group_layers(cache_windows, max_model_len=max_model_len, spans=cache_spans)
        # The first group is one without a window, if there is any. Compressed keys share none.
        can_share_prefixes = (
            config.cache.enable_prefix_caching
            and not config.worker.batch_invariant
            and pooling is None
            and not computes_whole_prompts
            and max(cache_spans, default=1) == 1
            and (not layer_groups or layer_groups[0].window is None)
        )
        return cls(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            # Vectors are not streamed, so no token waits for a long step.
            max_num_mixed_tokens=(
                config.scheduler.max_num_mixed_tokens if pooling is None else None
            ),
            max_model_len=max_model_len,
            block_size=config.cache.block_size,
            vocab_size=vocab_size,
            layer_groups=layer_groups,
            shared_prefix_tokens=(config.cache.least_prefix_tokens if can_share_prefixes else 0),
            num_speculative_tokens=config.speculation.num_speculative_tokens,
            min_speculative_tokens=config.speculation.min_speculative_tokens,
            lookup_sizes=config.speculation.lookup_sizes,
            has_draft_model=config.speculation.has_draft_model,
            num_encoder_pages=(pages_of(config.images.encoder_cache_tokens) if sees_images else 0),
            max_encoder_tokens=config.images.max_encoder_tokens,
            max_whole_tokens=max_whole_tokens,
            computes_whole_prompts=computes_whole_prompts,
            pooling=pooling,
            num_adapter_slots=config.adapters.max_loras,
            num_adapter_ranks=config.parallel.tensor_parallel_size
            * config.parallel.pipeline_parallel_size,
            num_stages=config.parallel.pipeline_parallel_size,
            data_parallel_size=config.parallel.data_parallel_size,
        )

    def of_entries(self, entries: range) -> "StepLimits":
        """Returns the limits of a stage with these cache entries, which it counts from 0.

        All stages have the groups of the whole model, even those of whose layers they have none.
        """
        groups = (
            replace(
                group,
                layers=tuple(each - entries.start for each in group.layers if each in entries),
            )
            for group in self.layer_groups
        )
        return replace(self, layer_groups=tuple(groups))

    @property
    def min_step_tokens(self) -> int:
        """Query tokens of a step that has room for the next tokens of any request."""
        if self.computes_whole_prompts:
            return self.max_model_len
        if not self.max_whole_tokens:
            return 1
        return self.max_whole_tokens + self.max_num_seqs * self.decode_q_len

    @property
    def shares_prefixes(self) -> bool:
        """Whether the cached tokens of a prompt need not be computed again."""
        return self.pooling in (None, "last") and not self.computes_whole_prompts

    @property
    def decode_q_len(self) -> int:
        """Query tokens of each request in a decode step: the newest and its drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Numbers of draft tokens that a step may have for each request, ascending."""
        most = self.num_speculative_tokens
        fewest = most if self.min_speculative_tokens is None else self.min_speculative_tokens
        return lengths_between(fewest, most)

    @property
    def num_worker_drafts(self) -> int:
        """Draft tokens that the worker makes for each request in a step."""
        return 0 if self.lookup_sizes else self.num_speculative_tokens

    @property
    def num_written_ahead(self) -> int:
        """Most tokens past a step's last for which drafting writes cache entries.

        Draft layers write an entry with each draft but the last; a small model has the newest
        token's besides.
        """
        return max(0, self.num_worker_drafts - (not self.has_draft_model))

    @property
    def max_decodes(self) -> int:
        """Most requests in a decode step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.decode_q_len)

    @property
    def max_padding_requests(self) -> int:
        """Requests of max_model_len tokens that together fill the largest step."""
        return -(-self.max_num_batched_tokens // self.max_model_len)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group of layers with tokens; None means all."""
        if not self.layer_groups:
            return (None,)
        windows = (group.window for group in self.layer_groups)
        return tuple(window for window in windows if window != STATE)

    @property
    def num_groups(self) -> int:
        """Groups of layers that keep tokens; a block table has an entry of each for a block."""
        return len(self.windows)

    @property
    def num_state_groups(self) -> int:
        """Groups of layers that keep states."""
        return len(self.layer_groups) - self.num_groups if self.layer_groups else 0

    @property
    def num_state_slots(self) -> int:
        """States of a request in each layer that keeps some: one for each token of a decode."""
        return self.decode_q_len

    @property
    def state_blocks(self) -> StateBlocks | None:
        """Numbers of the blocks that the states of a request take; None without states."""
        if not self.num_state_groups or not self.state_pages:
            return None
        return StateBlocks(
            num_groups=self.num_state_groups,
            num_slots=self.num_state_slots,
            num_pages=self.state_pages,
        )

    @property
    def num_state_blocks(self) -> int:
        """Blocks that the states of one request take."""
        blocks = self.state_blocks
        return 0 if blocks is None else blocks.num_live

    @property
    def token_table_width(self) -> int:
        """Entries of a row of the block table before those of its states."""
        return self.max_blocks_per_seq * self.num_groups

    @property
    def cache_groups(self) -> CacheGroups:
        """Groups of layers with the blocks that each needs."""
        return CacheGroups(
            block_size=self.block_size,
            # Blocks reach over the drafts in flight and the next ones, too.
            max_query_tokens=self.max_num_batched_tokens + 2 * self.num_speculative_tokens,
            windows=self.windows,
            spans=tuple(group.span for group in self.layer_groups[: self.num_groups]),
        )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that the longest sequence needs in each group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def block_table_width(self) -> int:
        """Entries of a row of the block table.

        Those of all groups with tokens come in turns; the pages of states, group after group, last.
        """
        return self.token_table_width + self.num_state_blocks

    def num_cache_tokens(self, num_blocks: int) -> int:
        """Returns the most tokens of one request that holds all blocks, one of them the null block.

        The count stops at max_model_len, rounded up to whole blocks.
        """
        num_left = num_blocks - 1 - self.num_state_blocks
        return (
            0 if num_left < 0 else self.cache_groups.num_tokens(num_left, limit=self.max_model_len)
        )
