"""How byte-level BPE splits a text first, by llama.cpp's name of the kind.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp; the kinds are those of its
convert_hf_to_gguf.py, which knows each tokenizer by a hash of what it does.
"""

from dataclasses import dataclass
from typing import Any

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions whose matches are split off, one after the other, before bytes are merged."""

    expressions: tuple[str, ...]
    takes_whole: bool = False
    """Whether a piece that is a token is taken without merges."""
    adds_bos: bool = False
    """Whether texts begin with the token for it, unless the file says otherwise."""
    normalizer: str | None = None

    def steps(self) -> dict[str, Any]:
        """Returns the pre_tokenizer of tokenizer.json."""
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
            for expression in self.expressions
        ]
        octets = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, octets]}


_LLAMA_3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA = PreTokenizer((_LLAMA_3,), takes_whole=True, adds_bos=True)
_THREE_DIGITS = PreTokenizer((_LLAMA_3,))
_QWEN = PreTokenizer((rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_REST}",), normalizer="NFC")
_ONE_DIGIT = PreTokenizer((r"\p{N}", _GPT_2))
_TEKKEN = PreTokenizer(
    ("|".join((*_CASED, r"\p{N}", _REST_WITH_SLASH)),), takes_whole=True, adds_bos=True
)
_O200K = PreTokenizer(
    ("|".join((*(f"{words}{_CONTRACTION}?" for words in _CASED), r"\p{N}{1,3}", _REST_WITH_SLASH)),)
)
_KIMI_UPPER, _KIMI_LOWER = (f"{each[:-1]}&&[^\\p{{Han}}]]" for each in (_UPPER, _LOWER))
_KIMI_2 = PreTokenizer(
    (
        "|".join(
            (
                r"[\p{Han}]+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
                r"\p{N}{1,3}",
                _REST,
            )
        ),
    ),
    takes_whole=True,
)
_DEEPSEEK_3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _ONE_DIGIT),
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), PreTokenizer((_GPT_2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": _TEKKEN,
    "kimi-k2": _KIMI_2,
    "deepseek-v3": _DEEPSEEK_3,
}
"""tokenizer.ggml.pre -> what it stands for."""
