"""Asks many questions at once over one stream, and prints each answer when it is complete.

    octavo serve                                      # in another terminal
    python examples/many_requests.py

A session costs the servers less than a call per request; one failed request leaves the others
alone. OCTAVO_FRONTEND says where the frontend is; 127.0.0.1:50050 if unset.
"""

import argparse
import asyncio
import os

from services.client.client import DEFAULT_ADDRESS, OctavoClient
from services.client.errors import OctavoError
from services.client.requests import Message, Options, Sampling
from services.client.session import Session

QUESTIONS = [f"What is {a} + {b}?" for a in range(1, 5) for b in range(1, 5)]


async def main() -> None:
    """Asks all the questions."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    address = os.environ.get("OCTAVO_FRONTEND", DEFAULT_ADDRESS)
    async with OctavoClient(address) as client, client.session() as session:
        await asyncio.gather(*(ask(session, question) for question in QUESTIONS))


async def ask(session: Session, question: str) -> None:
    """Asks one question and prints the answer."""
    options = Options(sampling=Sampling(temperature=0, max_tokens=30))
    try:
        answer = await session.chat([Message(role="user", content=question)], options).completion()
    except OctavoError as error:
        print(f"{question:16} failed: {error}")
    else:
        print(f"{question:16} {answer.text}")


if __name__ == "__main__":
    asyncio.run(main())
