"""Converts prompts to token ids and token ids to text, within limits."""

import asyncio
from collections.abc import Sequence
from functools import partial

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.parts import in_parts
from services.frontend.pipeline.prompt_size import (
    check_num_tokens,
    check_text_size,
    output_room,
)
from services.frontend.pipeline.request import Conversation, Options, check_vocabulary
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.pipeline.template_variables import check_template_variables
from services.frontend.pipeline.tools import check_tools
from services.frontend.text.chat_template import Message
from services.frontend.text.content_marks import MarkedText
from services.frontend.text.library_errors import EncodingError
from services.frontend.text.prompt_end import PromptEnd
from services.frontend.text.tokenizer_threads import TokenizerThreads


class Prompts:
    """Renders and encodes prompts; long ones in threads."""

    def __init__(self, *, max_prompt_bytes: int, num_tokenizer_threads: int) -> None:
        """Sets the limits; see `Pipeline`."""
        self._max_prompt_bytes = max_prompt_bytes
        self._threads = TokenizerThreads(num_tokenizer_threads)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    async def tokens(
        self, model: ServedModel, prompt: str | list[int] | Conversation, options: Options
    ) -> list[int]:
        """Returns a prompt's token ids, cut where the options say, within the model's limits."""
        limit = model.info.max_model_len
        most = _most_tokens(options, limit)
        if isinstance(prompt, list):
            token_ids = prompt
        else:
            token_ids = await self.encode(
                model, prompt, options.parse_special_tokens, limit if most is None else None
            )
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if most is not None:
            token_ids = token_ids[-most:]
        check_num_tokens(len(token_ids), limit)
        async for part in in_parts(token_ids):
            check_vocabulary(part, model.info.vocab_size)
        return token_ids

    async def encode(
        self,
        model: ServedModel,
        prompt: str | Conversation,
        parse_special_tokens: bool | None,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Returns a prompt's token ids; refuses `max_tokens` or more.

        The tokenizer adds special tokens to text alone, unless `add_special_tokens` says otherwise.
        """
        await check_text_size(prompt, max_bytes=self._max_prompt_bytes)
        check_length = None
        if max_tokens is not None:
            check_length = partial(check_num_tokens, max_model_len=max_tokens)
        if isinstance(prompt, Conversation):
            text = await self._render(model, prompt, marks_content=not parse_special_tokens)
        else:
            text = prompt
        try:
            return await model.tokenizer.encode(
                text,
                check_length=check_length,
                add_special_tokens=(
                    not isinstance(prompt, Conversation)
                    if add_special_tokens is None
                    else add_special_tokens
                ),
                parse_special_tokens=parse_special_tokens is not False,
                threads=self._threads,
            )
        except EncodingError as error:
            raise InvalidRequestError(str(error), field="prompt") from None

    async def decode(
        self, model: ServedModel, token_ids: Sequence[int], *, show_special_tokens: bool
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
        token_ids = [token_id async for part in in_parts(token_ids) for token_id in part]
        async for part in in_parts(token_ids):
            check_vocabulary(part, model.tokenizer.vocab_size)
        return await model.tokenizer.decode(
            token_ids, show_special_tokens=show_special_tokens, threads=self._threads
        )

    async def _render(
        self, model: ServedModel, conversation: Conversation, *, marks_content: bool
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
            messages,
            tools=tools,
            variables=variables,
            reasons=conversation.wants_reasoning,
            end=conversation.end,
            max_bytes=2 * self._max_prompt_bytes,
            marks_content=marks_content,
        )
        return MarkedText.read(rendered) if marks_content else rendered


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
