"""One request's output, from token batches to text."""

from collections.abc import Sequence
from typing import Self

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import LENGTH, STOP, TokenBatch, Usage
from services.frontend.engine_client.route import Route
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.errors import EngineFaultError, FrontendError
from services.frontend.pipeline.request import Output
from services.frontend.reply.deltas import joined_calls
from services.frontend.reply.reply_text import ReplyText, ReplyTextPiece
from services.frontend.text.output_text import OutputText, TextPiece


class Generation:
    """One request's output, charged as it is read. Iterate it to its end, or close it."""

    def __init__(
        self,
        request_id: str,
        stream: TokenStream,
        text: OutputText | ReplyText,
        *,
        lease: Lease,
        prompt_token_ids: Sequence[int],
        has_output: bool = True,
        stop_token_bytes: Sequence[bytes] | None = None,
    ) -> None:
        """Attaches the stream to the lease, which several generations may share.

        Without `has_output`, the engine's output is left out. `stop_token_bytes` are the texts of
        stop tokens, by token id, that the output's text ends with; None leaves them out.
        """
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self._text = text
        self._has_output = has_output
        self._stop_token_bytes = stop_token_bytes
        self._lease = lease
        self._num_output_tokens = 0
        self._is_over = False
        lease.attach(stream.abort)

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of the prompt, as the only entry."""
        return [self.prompt_token_ids]

    @property
    def route(self) -> Route:
        """The engines that got the request."""
        return self._stream.route

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Returns new output; the last one has a finish reason and usage.

        Raises:
            UnauthenticatedError: the caller's key was removed.
            FrontendError, EngineFaultError: the request failed.
        """
        if self._is_over:
            raise StopAsyncIteration
        batch = await self._read()
        shows_stop_token = self._shows_stop_token(batch)
        # The id of a stop token is part of the answer in any case.
        hides_last = batch.stop_token_id is not None and not shows_stop_token
        piece = self._text.push(batch.token_ids[:-1] if hides_last else batch.token_ids)
        pieces: list[TextPiece] = [piece]
        num_tokens, stop_string = piece.num_tokens, piece.stop_string
        if stop_string is None and batch.finish_reason is not None:
            tail = self._text.finish(is_cut=batch.finish_reason != STOP)
            pieces.append(tail)
            num_tokens, stop_string = len(batch.token_ids), tail.stop_string
        if stop_string is not None:
            await self._stop(batch, num_tokens)
        else:
            self._num_output_tokens += len(batch.token_ids)
        self._is_over = batch.finish_reason is not None
        output = Output(
            request_id=self.request_id,
            text="".join(piece.text for piece in pieces),
            token_ids=batch.token_ids,
            logprobs=batch.logprobs,
            prompt_logprobs=batch.prompt_logprobs,
            finish_reason=batch.finish_reason,
            usage=batch.usage,
            stop_string=stop_string,
            stop_token_id=batch.stop_token_id,
            shows_stop_token=shows_stop_token,
        )
        self._add_reply(output, pieces)
        return output

    async def admitted(self) -> None:
        """Waits until an engine admits the request.

        Raises:
            FrontendError, EngineFaultError: no engine does.
        """
        await self._stream.admitted()

    def cancel(self) -> None:
        """Ends the request early; iteration continues to a last output."""
        self._stream.abort()
        self._lease.detach(self._stream.abort)

    def close(self) -> None:
        """Ends the request if it is unfinished; nothing may be read afterwards."""
        if not self._is_over:
            self._is_over = True
            self.cancel()

    def _shows_stop_token(self, batch: TokenBatch) -> bool:
        """Whether a batch ends with a stop token whose text is part of the answer."""
        if batch.stop_token_id is None or self._stop_token_bytes is None:
            return False
        return bool(self._stop_token_bytes[batch.stop_token_id])

    def _add_reply(self, output: Output, pieces: Sequence[TextPiece]) -> None:
        """Adds reasoning and calls, and what the reasoning cost."""
        if not isinstance(self._text, ReplyText):
            return
        replies = [piece for piece in pieces if isinstance(piece, ReplyTextPiece)]
        output.reasoning = "".join(piece.reasoning for piece in replies)
        output.calls = joined_calls(call for piece in replies for call in piece.calls)
        if output.usage is not None:
            output.usage.reasoning_tokens = self._text.num_reasoning_tokens

    async def _read(self) -> TokenBatch:
        try:
            batch = await self._stream.read()
            if not self._has_output:
                _leave_out_output(batch)
            self._lease.charge_output(len(batch.token_ids))
        except BaseException:
            self.cancel()
            raise
        if batch.finish_reason is not None:
            self._lease.detach(self._stream.abort)
        return batch

    async def _stop(self, batch: TokenBatch, num_tokens: int) -> None:
        """Ends the request at a stop string, after some of a batch's tokens.

        The engine may have run past the stop string; do not count those tokens.
        """
        del batch.token_ids[num_tokens:], batch.logprobs[num_tokens:]
        self._num_output_tokens += num_tokens
        spent = batch.usage or await self._usage_after_abort()
        batch.finish_reason, batch.stop_token_id = STOP, None
        batch.usage = Usage()
        batch.usage.CopyFrom(spent)
        batch.usage.prompt_tokens = len(self.prompt_token_ids)
        batch.usage.output_tokens = self._num_output_tokens

    async def _usage_after_abort(self) -> Usage:
        self.cancel()
        try:
            while (usage := (await self._read()).usage) is None:
                pass
        except (FrontendError, EngineFaultError):  # the answer is complete anyway
            return Usage()
        return usage


def _leave_out_output(batch: TokenBatch) -> None:
    """Leaves out the one token that the engine samples after a prompt."""
    batch.token_ids, batch.logprobs, batch.stop_token_id = [], [], None
    if batch.finish_reason == STOP:
        batch.finish_reason = LENGTH
    if batch.usage is not None:
        batch.usage = Usage(
            prompt_tokens=batch.usage.prompt_tokens, cached_tokens=batch.usage.cached_tokens
        )
