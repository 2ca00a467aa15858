"""Converts prompts to token ids and token ids to text, within limits."""

import asyncio
from collections.abc import Sequence
from functools import partial

from services.frontend.access.caller import Lease
from services.frontend.access.held_bytes import HeldBytes
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.image_files import ImageFile, without_files
from services.frontend.pipeline.parts import in_parts
from services.frontend.pipeline.prompt_images import EncodedPrompt, PromptImages
from services.frontend.pipeline.prompt_size import (
    check_num_tokens,
    check_text_size,
    held_bytes,
    least_tokens,
    output_room,
    too_many_tokens,
)
from services.frontend.pipeline.request import Conversation, Options, check_vocabulary
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.pipeline.template_variables import check_template_variables
from services.frontend.pipeline.tools import check_tools
from services.frontend.text.chat_template import Message
from services.frontend.text.content_marks import MarkedText
from services.frontend.text.encoder import Encoding
from services.frontend.text.library_errors import EncodingError, TooManyTokensError
from services.frontend.text.prompt_end import PromptEnd
from services.frontend.text.tokenizer_threads import TokenizerThreads
from services.transport.counts import Counts

INLINE_CHARACTERS = 2048
"""Longer texts are encoded in a thread; this length takes 0.3 to 1.3 ms with the embedded model."""
INLINE_TOKENS = 8192
"""More tokens are decoded in a thread."""
LONG_CHARACTERS = 65_536
"""Longer texts, or prompts with more tokens, are converted in a process."""
TEMPLATE_GROWTH = 2
"""Most bytes that a template renders for one byte of the longest prompt."""
_TOKEN_BYTES = 36
"""Memory of a token id in a list."""
MAX_TEXTS = 256
"""Longest prompts in memory at a time that wait to be tokenized, or are."""
MAX_TEXTS_OF_ACCOUNT = 64
"""Limit per account: an API key, or a client address without keys."""


class Prompts:
    """Renders and encodes prompts; their bytes count until then."""

    def __init__(
        self,
        images: PromptImages,
        *,
        max_prompt_bytes: int,
        num_tokenizer_threads: int,
        counts: Counts,
    ) -> None:
        """Sets the limits; see `Pipeline`."""
        self._images = images
        self._max_prompt_bytes = max_prompt_bytes
        self._threads = TokenizerThreads(num_tokenizer_threads)
        self._held = HeldBytes(
            counts,
            "text_bytes",
            "texts that are being tokenized",
            limit=MAX_TEXTS * max_prompt_bytes,
            limit_per_account=MAX_TEXTS_OF_ACCOUNT * max_prompt_bytes,
        )

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    async def tokens(
        self,
        model: ServedModel,
        prompts: Sequence[str | list[int] | Conversation],
        options: Options,
        lease: Lease,
    ) -> list[EncodedPrompt]:
        """Returns each prompt's tokens, cut where the options say, within the model's limits."""
        num_bytes = 0
        for prompt in prompts:
            if not isinstance(prompt, list):
                await check_text_size(prompt, max_bytes=self._max_prompt_bytes)
                num_bytes += held_bytes(prompt)
        with self._held.holding(lease.account, num_bytes):
            return [await self._tokens(model, prompt, options, lease) for prompt in prompts]

    async def encode(
        self,
        model: ServedModel,
        prompt: str | Conversation,
        lease: Lease,
        *,
        parse_special_tokens: bool | None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Returns a prompt's token ids, those of its images included, however many.

        The tokenizer adds special tokens to text alone, unless `add_special_tokens` says otherwise.
        """
        await check_text_size(prompt, max_bytes=self._max_prompt_bytes)
        with lease.holding_meanwhile():
            files = self._images_of(model, prompt, lease, parse_special_tokens)
            with self._held.holding(lease.account, held_bytes(prompt)):
                text = await self._text_of(model, prompt, parse_special_tokens, lease.account)
                if add_special_tokens is None:
                    add_special_tokens = not isinstance(prompt, Conversation)
                token_ids = await self._encode(
                    model,
                    text,
                    lease,
                    add_special_tokens=add_special_tokens,
                    parse_special_tokens=parse_special_tokens,
                )
            if not isinstance(prompt, Conversation):
                return token_ids
            placed = await self._images.placed(model, token_ids, files, lease, max_tokens=None)
        return placed.token_ids

    async def decode(
        self,
        model: ServedModel,
        token_ids: Sequence[int],
        account: str,
        *,
        show_special_tokens: bool,
    ) -> str:
        """Returns the text of token ids.

        Raises:
            InvalidRequestError: there are too many ids, or one is not in the vocabulary.
        """
        if len(token_ids) > self._max_prompt_bytes:
            raise InvalidRequestError(
                f"there are {len(token_ids)} token ids; the limit is {self._max_prompt_bytes}",
                field="prompt",
            )
        with self._held.holding(account, _TOKEN_BYTES * len(token_ids)):
            token_ids = [token_id async for part in in_parts(token_ids) for token_id in part]
            async for part in in_parts(token_ids):
                check_vocabulary(part, model.tokenizer.vocab_size)
            if len(token_ids) > LONG_CHARACTERS:
                return await model.long_texts.decode(
                    token_ids, account, show_special_tokens=show_special_tokens
                )
            decode = partial(
                model.tokenizer.decode, token_ids, show_special_tokens=show_special_tokens
            )
            if len(token_ids) <= INLINE_TOKENS:
                return decode()
            return await self._threads.run(account, decode)

    async def _tokens(
        self,
        model: ServedModel,
        prompt: str | list[int] | Conversation,
        options: Options,
        lease: Lease,
    ) -> EncodedPrompt:
        limit = model.info.max_model_len
        most = _most_tokens(options, limit)
        if isinstance(prompt, list):
            encoded = EncodedPrompt(prompt)
        else:
            files = self._images_of(model, prompt, lease, options.parse_special_tokens)
            max_tokens = limit if most is None else None
            text = await self._text_of(model, prompt, options.parse_special_tokens, lease.account)
            _check_text(model, text, lease, most)
            token_ids = await self._encode(
                model,
                text,
                lease,
                add_special_tokens=not isinstance(prompt, Conversation),
                parse_special_tokens=options.parse_special_tokens,
                max_tokens=max_tokens,
            )
            encoded = EncodedPrompt(token_ids)
            if isinstance(prompt, Conversation):
                encoded = await self._images.placed(
                    model, token_ids, files, lease, max_tokens=max_tokens
                )
        if most is not None:
            encoded = encoded.last(most)
        if not encoded.token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        check_num_tokens(len(encoded.token_ids), limit)
        async for part in in_parts(encoded.token_ids):
            check_vocabulary(part, model.info.vocab_size)
        return encoded

    def _images_of(
        self,
        model: ServedModel,
        prompt: str | Conversation,
        lease: Lease,
        parse_special_tokens: bool | None,
    ) -> list[ImageFile]:
        """Returns a conversation's images, whose bytes count from now on.

        Raises:
            InvalidRequestError: there are too many, or the model sees none.
        """
        if not isinstance(prompt, Conversation):
            return []
        return self._images.check(
            model, prompt, lease, parses_special_tokens=bool(parse_special_tokens)
        )

    async def _encode(
        self,
        model: ServedModel,
        text: str | MarkedText,
        lease: Lease,
        *,
        add_special_tokens: bool,
        parse_special_tokens: bool | None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns a text's token ids; refuses `max_tokens` or more."""
        num_characters = len(text.text if isinstance(text, MarkedText) else text)
        wanted = Encoding(text, add_special_tokens, parse_special_tokens is not False, max_tokens)
        # Other requests may have used the caller's tokens up while this one waited.
        check = partial(lease.check_prompt, 1)
        try:
            if num_characters > LONG_CHARACTERS:
                return await model.long_texts.encode(wanted, lease.account, check=check)
            if num_characters > INLINE_CHARACTERS:
                return await self._threads.run(
                    lease.account, partial(wanted.run, model.tokenizer), check=check
                )
            return wanted.run(model.tokenizer)
        except EncodingError as error:
            raise InvalidRequestError(str(error), field="prompt") from None
        except TooManyTokensError as error:
            assert max_tokens is not None, "only then there may be too many"
            raise too_many_tokens(str(error.num_tokens), max_tokens) from None

    async def _text_of(
        self,
        model: ServedModel,
        prompt: str | Conversation,
        parse_special_tokens: bool | None,
        account: str,
    ) -> str | MarkedText:
        if isinstance(prompt, Conversation):
            marks_content = not parse_special_tokens
            return await self._render(model, prompt, account, marks_content=marks_content)
        return prompt

    async def _render(
        self, model: ServedModel, conversation: Conversation, account: str, *, marks_content: bool
    ) -> str | MarkedText:
        messages, tools = conversation.messages, conversation.tools
        variables = conversation.template_variables
        if not messages:
            raise InvalidRequestError(
                "the conversation has 0 messages; it must have at least 1", field="prompt"
            )
        check_tools(messages, tools, conversation.call_rules)
        if conversation.end is PromptEnd.LAST_MESSAGE:
            _check_continued(messages[-1])
        check_template_variables(variables)
        if model.template_error:
            raise InvalidRequestError(
                f"the model {model.info.model!r} takes text alone: {model.template_error}",
                field="prompt",
            )
        await asyncio.sleep(0)  # let other tasks run before the conversation is serialized
        if model.template is None:
            raise InvalidRequestError(
                f"the model {model.info.model!r} has no chat template; use Generate",
                field="prompt",
            )
        rendered = await model.template.render(
            without_files(messages),
            tools=tools,
            variables=variables,
            reasons=conversation.wants_reasoning,
            end=conversation.end,
            max_bytes=TEMPLATE_GROWTH * self._max_prompt_bytes,
            marks_content=marks_content,
            account=account,
        )
        return model.with_text_around_images(rendered) if marks_content else rendered


def _check_text(model: ServedModel, text: str | MarkedText, lease: Lease, most: int | None) -> None:
    """Refuses a text by its length alone, where that is certain.

    Raises:
        InvalidRequestError: it cannot fit, and is not to be cut to `most` tokens.
        OverloadedError: the caller has too few tokens left for it.
    """
    longest = model.tokenizer.longest_token_bytes
    if longest is None:
        return
    num_tokens = least_tokens(text, longest)
    if most is None and num_tokens >= model.info.max_model_len:
        raise too_many_tokens(f"at least {num_tokens}", model.info.max_model_len)
    lease.check_prompt(num_tokens if most is None else min(most, num_tokens))


def _most_tokens(options: Options, max_model_len: int) -> int | None:
    """Returns the number of last tokens that a prompt keeps; None if it must fit as it is."""
    if options.truncate_prompt_tokens is None:
        return None
    max_tokens = 1 if options.sampling is None else options.sampling.max_tokens
    room = max_model_len - output_room(max_tokens, max_model_len)
    return max(1, min(options.truncate_prompt_tokens, room))


def _check_continued(message: Message) -> None:
    """Raises InvalidRequestError for a last message that no reply can continue."""
    if message["role"] != "assistant":
        problem = f"is of {message['role'][:64]!r}; only the assistant's can be continued"
    elif "tool_calls" in message:
        problem = "has tool calls, which come after its content, so it cannot be continued"
    elif message.get("content") is None:
        problem = "has no content to continue"
    else:
        return
    raise InvalidRequestError(f"the last message {problem}", field="continue_final_message")
