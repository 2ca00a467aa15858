"""Refuses limits whose tables fit into no machine, before a worker allocates them."""

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.config.engine_config import EngineConfig

MAX_TABLE_BYTES = 2**32
"""Most bytes of tables whose size depends on the longest sequence.

256 requests of a million tokens, with heads of 128, take 3.7 GB. Indices of entries then fit into
32 bits, as models.ops.elementwise.table_entries needs them.
"""

_INT32_BYTES = 4
_TOKEN_BYTES = 32
"""Of one token of a step, in the inputs: ids, positions, rows and slots."""
_ROTATION_BYTES = 20
"""Of one element of a head at one position: float32 angles, cosines, sines and the table."""


def check_table_memory(config: EngineConfig, model: ModelConfig) -> None:
    """Checks the longest sequence and the largest step of an engine.

    Raises:
        ModelFolderError: tables for one of them take more than MAX_TABLE_BYTES.
    """
    num_tokens = config.max_num_batched_tokens
    if _TOKEN_BYTES * num_tokens > MAX_TABLE_BYTES:
        raise ModelFolderError(
            f"inputs of a step of {num_tokens} tokens would take {_TOKEN_BYTES * num_tokens} "
            f"bytes; the limit is {MAX_TABLE_BYTES}. Lower --max-num-batched-tokens"
        )
    length = config.checkpoint.max_model_len or model.max_position_embeddings
    num_groups = len({window for window in model.cache_windows if window != STATE})
    block_entries = -(-length // config.cache.block_size) * num_groups
    row_bytes = _INT32_BYTES * (length + 1 + block_entries)
    num_bytes = (
        config.scheduler.max_num_seqs + 1
    ) * row_bytes + _ROTATION_BYTES * model.head_dim * length
    if num_bytes > MAX_TABLE_BYTES:
        raise ModelFolderError(
            f"tables for {config.scheduler.max_num_seqs} requests of {length} tokens would take "
            f"{num_bytes} bytes; the limit is {MAX_TABLE_BYTES}. Lower --max-model-len or "
            "--max-num-seqs"
        )
