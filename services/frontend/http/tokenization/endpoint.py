"""The endpoints that convert between text and token ids, in the form of vLLM's server."""

import json
from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from services.frontend.access.caller import Lease
from services.frontend.http.endpoint import PlainEndpoint
from services.frontend.http.tokenization.calls import DetokenizeCall, TokenizeCall
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.parts import in_parts
from services.frontend.pipeline.request import Conversation


class TokenizeAnswer(TypedDict):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizeEndpoint(PlainEndpoint[TokenizeCall]):
    """Answers with the token ids of a prompt as the engine gets them."""

    async def answer(self, call: TokenizeCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""
        assert isinstance(call.prompt, str | Conversation), "a text or a conversation"
        token_ids = await self.pipeline.tokenize(
            call.options.model,
            call.prompt,
            lease,
            parse_special_tokens=call.options.parse_special_tokens,
            add_special_tokens=call.add_special_tokens,
        )
        model = self.pipeline.models.named(call.options.model)
        fields = {  # of a TokenizeAnswer, which is encoded in parts
            "count": json.dumps(len(token_ids)),
            "max_model_len": json.dumps(model.info.max_model_len),
            "tokens": await _list_in_json(token_ids),
            "token_strs": "null",
        }
        if call.returns_texts:
            texts = [
                text
                async for part in in_parts(token_ids)
                for text in model.tokenizer.token_texts(part)
            ]
            fields["token_strs"] = await _list_in_json(texts)
        await writer.write_json(
            "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
        )


class DetokenizeEndpoint(PlainEndpoint[DetokenizeCall]):
    """Answers with the text of token ids, special tokens included."""

    async def answer(self, call: DetokenizeCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""
        text = await self.pipeline.detokenize(
            call.options.model, call.token_ids, lease.account, show_special_tokens=True
        )
        answer: DetokenizeAnswer = {"prompt": text}
        await writer.write(answer)


async def _list_in_json(items: Sequence[Any]) -> str:
    """Encodes a long list; other tasks run meanwhile."""
    parts = [
        json.dumps(part, ensure_ascii=False, separators=(",", ":"))[1:-1]
        async for part in in_parts(items)
    ]
    return f"[{','.join(parts)}]"
