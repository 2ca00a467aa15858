"""No tool calls: reasoning and content."""

from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader


class PlainReader(ReplyReader):
    """Reads all that is not reasoning as content."""

    has_calls = False

    def _read_reply(self) -> Wait:
        yield from self._read_content()
