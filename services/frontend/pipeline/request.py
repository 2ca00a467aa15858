"""Requests and their output, independent of gRPC and HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.frontend.engine_client.messages import SamplingParams, TokenBatch
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.image_files import ImageFile, images_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.reply.deltas import CallPiece
from services.frontend.text.chat_template import REASONING_SWITCHES, Message
from services.frontend.text.prompt_end import PromptEnd

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_CHARACTERS = 128
MAX_MESSAGES = 4096
MAX_MODEL_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_FORBIDDEN_TOKENS = 2048
MAX_CHOICES = 1024
"""Limits that the engine also has, checked here to keep messages small."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256
MAX_GRAMMAR_BYTES = 2**20
"""Limit of a structured output's text. Engines accept less; see --max-grammar-bytes."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, oldest first, and the tools that the model may call."""

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    call_rules: CallRules = field(default_factory=CallRules)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""
    reasons: bool | None = None
    """Whether the reply must have reasoning, or must have none; None leaves it to the template."""
    max_reasoning_tokens: int | None = None
    """Limit of the reply's reasoning; None leaves it to the server."""
    end: PromptEnd = PromptEnd.ANSWER
    """Where the prompt ends."""

    @property
    def open_text(self) -> str:
        """The text that the reply continues; empty if it begins a message."""
        if self.end is not PromptEnd.LAST_MESSAGE:
            return ""
        return str(self.messages[-1]["content"])

    @property
    def images(self) -> list[ImageFile]:
        """The images of all messages, in their order."""
        return images_of(self.messages)

    @property
    def wants_reasoning(self) -> bool | None:
        """`reasons`, or what the template variables say that turn the reasoning on or off."""
        variables = self.template_variables
        if variables.get("reasoning_effort") == "none":
            return False
        if self.reasons is not None:
            return self.reasons
        return next(
            (v for v in map(variables.get, REASONING_SWITCHES) if isinstance(v, bool)), None
        )


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Several prompts of one request, each with outputs of its own."""

    prompts: Sequence[str | list[int]]


Prompt = str | list[int] | Conversation | PromptBatch
"""Text, token ids used as they are, a conversation, or several of the first two."""


def prompts_of(prompt: Prompt) -> Sequence[str | list[int] | Conversation]:
    """Returns the single prompts of a request."""
    return prompt.prompts if isinstance(prompt, PromptBatch) else [prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A caller's options; see GenerationOptions in frontend.proto."""

    model: str = ""
    request_id: str
    sampling: SamplingParams | None = None
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that the output may not have."""
    show_stop: bool = False
    """Whether the text has what ended it: the stop string, or the stop token's visible text."""
    priority: int = 0
    cache_salt: str = ""
    show_special_tokens: bool = False
    num_samples: int = 1
    has_output: bool = True
    """Whether the request wants output, not only facts about its prompt."""
    parse_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt, which keeps its last ones; None refuses one that is too long."""
    traceparent: str = ""
    """The parent span; empty for none."""


@dataclass(slots=True, kw_only=True)
class Output(TokenBatch):
    """New output of one request; see Output in frontend.proto."""

    request_id: str
    index: int = 0
    """Index of the sample."""
    text: str
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    stop_string: str | None = None
    shows_stop_token: bool = False
    """Whether the text has the text of the stop token."""


def check_options(options: Options, *, max_samples: int, num_prompts: int = 1) -> None:
    """Raises InvalidRequestError for an option over its limit, before it is copied."""
    if not 1 <= options.num_samples <= max_samples:
        raise InvalidRequestError(
            f"n is {options.num_samples}; it must be 1 to {max_samples}", field="n"
        )
    num_outputs = num_prompts * options.num_samples
    if num_outputs > max_samples:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n of {options.num_samples} have {num_outputs} outputs; one"
            f" request may have {max_samples}",
            field="prompt",
        )
    limit = MAX_REQUEST_ID_CHARACTERS  # the engine's limit, minus the index that samples append
    limit -= len(f"#{num_outputs - 1}") if num_outputs > 1 else 0
    _check_length("request_id", len(options.request_id), limit, "characters")
    _check_length("cache_salt", len(options.cache_salt), MAX_CACHE_SALT_CHARACTERS, "characters")
    _check_length("stop", len(options.stop), MAX_STOP_STRINGS, "strings")
    for stop in options.stop:
        if not 0 < len(stop.encode()) <= MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(
                f"a stop string has {len(stop.encode())} bytes;"
                f" it must have 1 to {MAX_STOP_STRING_BYTES}",
                field="stop",
            )
    _check_length("bad_words", len(options.bad_words), MAX_BAD_WORDS, "texts")
    for word in options.bad_words:
        if not 0 < len(word.encode()) <= MAX_BAD_WORD_BYTES:
            raise InvalidRequestError(
                f"a text of bad_words has {len(word.encode())} bytes; it must have 1 to"
                f" {MAX_BAD_WORD_BYTES}",
                field="bad_words",
            )
    if options.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves no prompt; it must be at least 1",
            field="truncate_prompt_tokens",
        )
    _check_length("model", len(options.model), MAX_MODEL_CHARACTERS, "characters")
    if options.sampling is not None:
        _check_sampling(options.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    _check_length("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS, "entries")
    _check_length("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES, "entries")
    num_allowed = len(sampling.allowed_token_ids)
    _check_length("allowed_token_ids", num_allowed, MAX_ALLOWED_TOKEN_IDS, "entries")
    num_forbidden = sum(len(each.token_ids) for each in sampling.forbidden_sequences)
    _check_length("forbidden_sequences", num_forbidden, MAX_FORBIDDEN_TOKENS, "tokens")
    wanted = sampling.structured_output
    num_choices = len(wanted.choice.texts)
    if num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"structured_output.choice has {num_choices} texts; it must have 1 to {MAX_CHOICES}",
            field="structured_output",
        )
    _check_length("structured_output", wanted.ByteSize(), MAX_GRAMMAR_BYTES, "bytes")


def _check_length(what: str, length: int, limit: int, unit: str) -> None:
    if length > limit:
        raise InvalidRequestError(f"{what} has {length} {unit}; the limit is {limit}", field=what)


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError unless every id is below `vocab_size`."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(f"token id {largest} is not below {vocab_size}", field="prompt")
