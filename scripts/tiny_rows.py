"""Rows of tokens that the tiny models are trained on, and the schedule of a training."""

import math
from dataclasses import dataclass

import torch
from tiny_corpus import Message
from tokenizers import Tokenizer
from torch import Tensor

WARMUP_SHARE = 1 / 30  # of the steps
PROMPT_WEIGHT = 0.1  # loss weight of tokens that the assistant does not write
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a model is trained."""

    steps: int
    num_rows: int
    """Rows of a step."""
    peak: float
    """The highest learning rate."""

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step: a short warm-up, then a cosine."""
        warmup = min(1.0, (step + 1) / max(1, self.steps * WARMUP_SHARE))
        decay = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak * warmup * decay


def pack(
    tokenizer: Tokenizer, documents: list[list[Message]], row_tokens: int
) -> tuple[Tensor, Tensor]:
    """Encodes the documents and packs them into rows that each start with a new document.

    Returns:
        Token ids, int64, and loss weights, fp32, both [N, row_tokens].
    """
    pieces: list[tuple[str, float]] = []
    ends: list[int] = []
    for chat in documents:
        for message in chat:
            if message.role == "text":
                pieces.append((message.content + END_OF_TEXT, 1.0))
                continue
            weight = 1.0 if message.role == "assistant" else PROMPT_WEIGHT
            header = (f"{IM_START}{message.role}\n", PROMPT_WEIGHT)
            pieces += [header, (message.content + IM_END, weight), ("\n", PROMPT_WEIGHT)]
        ends.append(len(pieces))
    encodings = tokenizer.encode_batch_fast([text for text, _ in pieces])
    all_ids, all_weights = list[list[int]](), list[list[float]]()
    ids, weights = list[int](), list[float]()
    for start, end in zip([0, *ends], ends, strict=False):
        for (_, weight), encoding in zip(pieces[start:end], encodings[start:end], strict=True):
            ids += encoding.ids
            weights += [weight] * len(encoding.ids)
        if len(ids) >= row_tokens:
            all_ids.append(ids[:row_tokens])
            all_weights.append(weights[:row_tokens])
            ids, weights = [], []
    return torch.tensor(all_ids), torch.tensor(all_weights)
