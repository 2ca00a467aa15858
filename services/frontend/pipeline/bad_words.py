"""Turns texts that an output may not have into sequences of tokens."""

import asyncio
import dataclasses

from services.frontend.engine_client.messages import SamplingParams
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request import MAX_FORBIDDEN_TOKENS, Options
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.text.library_errors import EncodingError


async def with_forbidden_words(options: Options, model: ServedModel) -> Options:
    """Returns options whose sampling forbids the tokens of `bad_words`.

    Raises:
        InvalidRequestError: a text cannot be encoded, or they have too many tokens.
    """
    if not options.bad_words:
        return options
    sampling = SamplingParams()
    if options.sampling is not None:
        sampling.CopyFrom(options.sampling)
    num_tokens = 0
    for text in sorted({form for word in options.bad_words for form in _forms(word)}):
        token_ids = await _encode(text, model)
        if not token_ids or max(token_ids) >= model.info.vocab_size:
            continue  # the model cannot write it
        num_tokens += len(token_ids)
        if num_tokens > MAX_FORBIDDEN_TOKENS:
            raise InvalidRequestError(
                f"bad_words have over {MAX_FORBIDDEN_TOKENS} tokens, which is the limit",
                field="bad_words",
            )
        sampling.forbidden_sequences.add(token_ids=token_ids)
    return dataclasses.replace(options, sampling=sampling)


def _forms(word: str) -> tuple[str, ...]:
    """Returns a word as it begins a text, and as it follows a space; as vLLM does."""
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)


async def _encode(text: str, model: ServedModel) -> list[int]:
    await asyncio.sleep(0)  # let other tasks run between two of many texts
    try:
        return model.tokenizer.encode(text, add_special_tokens=False)
    except EncodingError as error:
        raise InvalidRequestError(f"bad_words: {error}", field="bad_words") from None
