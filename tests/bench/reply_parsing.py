"""CPU that reading a chat's reply costs per token: `python -m tests.bench.reply_parsing`.

Each reply comes token by token, a token being a few characters, as in a stream. The text alone is
the base: a token is detokenized and nothing else. The rest of a row is what it costs to find
reasoning, content and tool calls in it, and stop strings in the content. Each figure is the least
of --rounds.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

from services.frontend.reply.format_choice import FORMATS
from services.frontend.reply.reply_reader import ReplyReader, Tools
from services.frontend.reply.reply_text import ReplyText
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.output_text import OutputText
from services.frontend.text.stop_strings import StopStrings

TOOLS: Tools = {"search": {"type": "object", "properties": {"query": {"type": "string"}}}}
PROSE = "The quick brown fox jumps over the lazy dog. "
TOKEN_CHARACTERS = 4
STOPS = ("\nUser:", "END OF TEXT")

Output = OutputText | ReplyText


def replies(reader: type[ReplyReader], size: int) -> dict[str, str]:
    """Returns replies of about `size` tokens: content, reasoning, and the arguments of a call."""
    prose = PROSE * (size * TOKEN_CHARACTERS // len(PROSE))
    made = {"content": prose}
    if reader.think[0]:
        begin, end = reader.preamble(is_call=False)
        made["reasoning"] = f"{begin}{prose}{end}Yes."
    form = reader.call_form
    if form is not None:
        argument = json.dumps({"query": prose})
        if form.pairs is not None:
            quote = "" if form.pairs.bare_strings else '"'
            argument = (
                f"{form.pairs.begin}query{form.pairs.assign}{quote}{prose}{quote}{form.pairs.end}"
            )
        before = form.before.replace("NAME", "search")
        made["call"] = f"{form.begin}{before}{argument}{form.after}{form.end}"
    return made


def cpu_us_per_token(new: Callable[[], Output], num_tokens: int, rounds: int) -> float:
    """Returns the CPU time of one token in microseconds."""
    least = float("inf")
    for _ in range(rounds):
        output = new()
        started = time.process_time_ns()
        for token_id in range(num_tokens):
            output.push((token_id,))
        output.finish(is_cut=False)
        least = min(least, time.process_time_ns() - started)
    return least / 1e3 / num_tokens


def measure(
    name: str, size: int, rounds: int, stops: Sequence[str]
) -> list[tuple[str, float, float, float]]:
    """Returns kind, and the cost of the text alone, of a reply, and of one with stop strings."""
    reader = FORMATS[name]
    rows = []
    for kind, reply in replies(reader, size).items():
        pieces = [
            reply[i : i + TOKEN_CHARACTERS].encode() for i in range(0, len(reply), TOKEN_CHARACTERS)
        ]

        def text(pieces: Sequence[bytes] = pieces) -> Output:
            return OutputText(Detokenizer(pieces, ()), StopStrings(()))

        def read(strings: Sequence[str], pieces: Sequence[bytes] = pieces) -> Output:
            return ReplyText(Detokenizer(pieces, ()), reader(TOOLS), StopStrings(strings))

        alone, whole, stopped = (
            cpu_us_per_token(new, len(pieces), rounds)
            for new in (text, lambda: read(()), lambda: read(stops))
        )
        rows.append((kind, alone, whole, stopped))
    return rows


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    args = parser.parse_args()
    print("| format | reply | text alone, us | read, us | read with 2 stop strings, us |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.formats:
        for kind, *figures in measure(name, args.tokens, args.rounds, STOPS):
            print(f"| {name} | {kind} | {' | '.join(f'{each:.2f}' for each in figures)} |")


if __name__ == "__main__":
    main()
