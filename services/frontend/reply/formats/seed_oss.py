"""Seed-OSS: calls as Qwen3-Coder writes them, between tags of its own and with values on one line.

Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.formats.qwen3_coder import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Qwen3CoderReader,
)

OPENING, CLOSING = "<seed:tool_call>", "</seed:tool_call>"


class SeedOssReader(Qwen3CoderReader):
    """Reads calls between the tags of Seed-OSS."""

    opening = OPENING
    closing = CLOSING
    think = ("<seed:think>", "</seed:think>")
    call_markers = (OPENING,)
    special_tokens = (OPENING, CLOSING)
    call_form = CallForm(
        f"{OPENING}\n{FUNCTION}NAME>\n",
        f"{FUNCTION_END}\n{CLOSING}",
        separator="\n",
        trigger=OPENING,
        pairs=ArgumentPairs(
            begin=PARAMETER, assign=">", end=f"{PARAMETER_END}\n", bare_strings=True
        ),
    )
