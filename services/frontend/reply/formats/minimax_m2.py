"""MiniMax M2: `<invoke name="...">` with `<parameter name="...">`, in one `<minimax:tool_call>`.

Source: the chat template of MiniMaxAI/MiniMax-M2.
"""

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

CALLS, CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
CALL, CALL_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
NAME_END = '">'


class MinimaxM2Reader(ReplyReader):
    """Reads calls whose arguments are tagged; each argument is passed on when it is complete."""

    call_form = CallForm(
        f"{CALL}NAME{NAME_END}\n",
        f"{CALL_END}\n",
        begin=f"{CALLS}\n",
        end=CALLS_END,
        trigger=CALLS,
        pairs=ArgumentPairs(
            begin=PARAMETER, assign=NAME_END, end=f"{PARAMETER_END}\n", bare_strings=True
        ),
    )
    call_markers = (CALLS,)
    special_tokens = (CALLS, CALLS_END)

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(CALLS)) is not None:
            num_calls = self._num_calls
            yield from self._try_call(
                self._read_first_call(),
                opening=CALLS,
                closing=(CALL_END,),
                following=(CALL, CALLS_END),
            )
            if self._num_calls > num_calls:
                yield from self._read_more_calls()

    def _read_more_calls(self) -> Wait:
        while (yield from self._read_content(CALL, CALLS_END)) == CALL:
            yield from self._try_call(
                self._read_call(), opening=CALL, closing=(CALL_END,), following=(CALL, CALLS_END)
            )

    def _read_first_call(self) -> Wait:
        yield from self._text.expect(CALL)
        yield from self._read_call()

    def _read_call(self) -> Wait:
        name = (yield from self._text.text_until(NAME_END)).strip()
        self._start_call(name)
        yield from self._read_pairs(name, closing=CALL_END)
