"""Encodes the inputs of requests for vectors and scores, and cuts long ones."""

from collections.abc import AsyncIterator, Sequence

from services.frontend.access.caller import Lease
from services.frontend.pipeline.prompts import Prompts
from services.frontend.pipeline.served_model import ServedModel


class InputEncoder:
    """Encodes the inputs of one request."""

    def __init__(
        self, prompts: Prompts, model: ServedModel, lease: Lease, *, limit: int | None
    ) -> None:
        """Takes the request's model and lease; limit: most tokens of an input, None cuts none."""
        self._prompts = prompts
        self._model = model
        self._lease = lease
        self._limit = limit

    async def text(self, text: str) -> list[int]:
        """Returns a text's tokens; a cut keeps the tokenizer's own around the first ones."""
        token_ids = await self._prompts.encode(
            self._model, text, self._lease, parse_special_tokens=None
        )
        if self._limit is None or len(token_ids) <= self._limit:
            return token_ids
        plain = await self._plain(text, parse_special_tokens=None)
        return cut(token_ids, plain, self._limit)

    async def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None,
        max_document_tokens: int | None,
    ) -> AsyncIterator[list[int]]:
        """Yields the tokens that score each pair of a query and a document.

        Args:
            pairs: queries and documents.
            instruction: the criterion; None for the model's.
            max_document_tokens: most tokens of a document; None for all.
        """
        pair = self._model.info.pooling.pair
        prefix, suffix = [
            await self._plain(text, parse_special_tokens=True)
            for text in (pair.prefix, pair.suffix)
        ]
        if instruction is None:
            instruction = pair.instruction
        for query, document in pairs:
            if max_document_tokens is not None:
                document = await self._beginning(document, max_document_tokens)
            if not pair.text:
                yield [*await self.text(query), *await self.text(document)][: self._limit]
                continue
            text = pair.text.format(instruction=instruction, query=query, document=document)
            own = await self._plain(text, parse_special_tokens=False)
            if self._limit is not None:
                own = own[: max(1, self._limit - len(prefix) - len(suffix))]
            yield [*prefix, *own, *suffix]

    async def _beginning(self, text: str, num_tokens: int) -> str:
        """Returns the text of a text's first tokens."""
        if len(text.encode()) <= num_tokens:  # no token is shorter than a byte
            return text
        token_ids = await self._plain(text, parse_special_tokens=False)
        if len(token_ids) <= num_tokens:
            return text
        beginning = await self._prompts.decode(
            self._model, token_ids[:num_tokens], self._lease.account, show_special_tokens=True
        )
        return beginning.rstrip("\N{REPLACEMENT CHARACTER}")  # a character that was cut

    async def _plain(self, text: str, *, parse_special_tokens: bool | None) -> list[int]:
        """Returns a text's tokens without the tokenizer's own."""
        return await self._prompts.encode(
            self._model,
            text,
            self._lease,
            parse_special_tokens=parse_special_tokens,
            add_special_tokens=False,
        )


def cut(token_ids: Sequence[int], plain: Sequence[int], limit: int) -> list[int]:
    """Returns at most `limit` tokens: the first of a text, between the tokens around it.

    Args:
        token_ids: of the text, with the tokenizer's own before and after.
        plain: of the text alone.
        limit: at least 1; where the tokenizer's own are more, the first ones are returned.
    """
    num_own = len(token_ids) - len(plain)
    starts = range(num_own + 1)
    start = next((n for n in starts if token_ids[n : n + len(plain)] == plain), 0)
    end = start + len(plain)
    kept = plain[: max(0, limit - num_own)]
    return [*token_ids[:start], *kept, *token_ids[end:]][:limit]
