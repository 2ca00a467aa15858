"""Chooses the format of a model's replies, by name or from its chat template."""

from collections.abc import Mapping

from services.frontend.reply.formats.deepseek import CALLS, DeepseekV3Reader, DeepseekV31Reader
from services.frontend.reply.formats.gemma4 import OPENING as GEMMA_OPENING
from services.frontend.reply.formats.gemma4 import Gemma4Reader
from services.frontend.reply.formats.glm4 import KEY, Glm4Reader
from services.frontend.reply.formats.harmony import HarmonyReader
from services.frontend.reply.formats.hermes import OPENING, HermesReader
from services.frontend.reply.formats.kimi_k2 import CALLS as KIMI_CALLS
from services.frontend.reply.formats.kimi_k2 import KimiK2Reader
from services.frontend.reply.formats.llama3_json import PYTHON_TAG, Llama3JsonReader
from services.frontend.reply.formats.minimax_m2 import CALLS as MINIMAX_CALLS
from services.frontend.reply.formats.minimax_m2 import MinimaxM2Reader
from services.frontend.reply.formats.minimax_m3 import BEFORE_TAG, MinimaxM3Reader
from services.frontend.reply.formats.mistral import MistralReader, MistralV11Reader
from services.frontend.reply.formats.plain import PlainReader
from services.frontend.reply.formats.pythonic import START, PythonicReader
from services.frontend.reply.formats.qwen3_coder import FUNCTION, PARAMETER, Qwen3CoderReader
from services.frontend.reply.formats.seed_oss import OPENING as SEED_OPENING
from services.frontend.reply.formats.seed_oss import SeedOssReader
from services.frontend.reply.reply_reader import ReplyReader

FORMATS: Mapping[str, type[ReplyReader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3JsonReader,
    "pythonic": PythonicReader,
    "mistral": MistralReader,
    "mistral_v11": MistralV11Reader,
    "deepseek_v3": DeepseekV3Reader,
    "deepseek_v31": DeepseekV31Reader,
    "glm4": Glm4Reader,
    "qwen3_coder": Qwen3CoderReader,
    "seed_oss": SeedOssReader,
    "minimax_m2": MinimaxM2Reader,
    "minimax_m3": MinimaxM3Reader,
    "kimi_k2": KimiK2Reader,
    "gemma4": Gemma4Reader,
    "harmony": HarmonyReader,
    "plain": PlainReader,
}
"""Readers by the name of their format; --reply-format has the same names."""


_OWN_TAGS = {
    KIMI_CALLS: "kimi_k2",
    BEFORE_TAG: "minimax_m3",
    MINIMAX_CALLS: "minimax_m2",
    SEED_OPENING: "seed_oss",
    GEMMA_OPENING: "gemma4",
    KEY: "glm4",
}
"""Tags that one format alone has."""


def format_of_template(source: str) -> str:
    """Returns the name of the format that a chat template writes earlier calls in.

    A template that writes none has the plain format, whose replies have no calls.
    """
    # In this order: the tag of Hermes for a call is that of GLM and Qwen3-Coder, too.
    if "<|channel|>" in source and "functions." in source:
        return "harmony"
    if CALLS in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    if own := [name for tag, name in _OWN_TAGS.items() if tag in source]:
        return own[0]
    if "[TOOL_CALLS]" in source:
        return "mistral_v11" if "[ARGS]" in source else "mistral"
    if OPENING in source and FUNCTION in source and PARAMETER in source:
        return "qwen3_coder"
    if OPENING in source:
        return "hermes"
    if START in source or "func_name1(" in source:
        return "pythonic"
    if PYTHON_TAG in source or '"parameters": ' in source:
        return "llama3_json"
    return "plain"
