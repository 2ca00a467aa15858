"""The sizes that bound steps and the worker's tables."""

from dataclasses import dataclass

from services.engine.kv_cache.cache_groups import LayerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large a step and the worker's tables may be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    cache_groups: tuple[LayerGroup, ...] = ()
    """The model's layers by the blocks that they keep; empty: they are one group."""
    num_speculative_tokens: int = 0
    """Draft tokens of a request in a step at most; 0 without speculative decoding."""

    @property
    def decode_q_len(self) -> int:
        """Query tokens of each request in a decode step: the newest and its drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def max_decodes(self) -> int:
        """Most requests in a decode step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.decode_q_len)

    @property
    def max_padding_requests(self) -> int:
        """Requests that can have as many tokens as the largest step, which thus fill up any."""
        return -(-self.max_num_batched_tokens // self.max_model_len)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that the longest sequence needs in each group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_groups(self) -> int:
        """How many groups there are; a row of the block table has their entries in turns."""
        return max(1, len(self.cache_groups))

    @property
    def block_table_width(self) -> int:
        """Entries of a row of the block table."""
        return self.max_blocks_per_seq * self.num_groups
