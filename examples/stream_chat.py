"""Streams one answer to the terminal, with the Python client.

    octavo serve                                      # in another terminal
    python examples/stream_chat.py "What is 7 + 5?"

OCTAVO_FRONTEND says where the frontend is; 127.0.0.1:50050 if unset.
"""

import argparse
import asyncio
import os

from services.client.client import DEFAULT_ADDRESS, OctavoClient
from services.client.requests import Message, Options, Sampling


async def main() -> None:
    """Asks what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", nargs="?", default="Tell me a story about Mia and Tom.")
    question = parser.parse_args().question
    options = Options(sampling=Sampling(temperature=0, max_tokens=200))
    async with OctavoClient(os.environ.get("OCTAVO_FRONTEND", DEFAULT_ADDRESS)) as client:
        async for chunk in client.chat([Message(role="user", content=question)], options):
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None and chunk.finish_reason is not None:
                print(f"\n\n{chunk.usage.output_tokens} tokens, {chunk.finish_reason.value}")


if __name__ == "__main__":
    asyncio.run(main())
