"""Keeps responses in memory, within limits, each for its owner alone."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.frontend.errors import InvalidRequestError, UnknownResponseError
from services.frontend.pipeline.image_files import (
    ImageFile,
    images_of,
    with_files,
    without_files,
)
from services.frontend.pipeline.request import MAX_MESSAGES
from services.frontend.text.chat_template import Message

OVERHEAD_BYTES = 1024
"""Counted for each response beside its texts."""
EXPIRY_INTERVAL_S = 5.0
MAX_SHOWN_CHARACTERS = 128
"""Characters of an id shown in an error."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of the store."""

    max_responses: int
    max_bytes: int
    max_age_s: float
    max_conversation_bytes: int
    """The longest conversation that a request may continue, in JSON without images."""
    max_conversation_image_bytes: int
    """Most bytes of images in it."""


@dataclass(slots=True, eq=False)
class Turn:
    """The messages that one response added to a conversation."""

    messages: bytes
    """In JSON, without images: less memory than objects, and exactly countable."""
    images: Sequence[ImageFile]
    """The images of the messages, in their order."""
    num_messages: int
    previous: "Turn | None"
    input_items: bytes
    """The request's items, in JSON."""
    output_items: bytes
    """The response's items, in JSON."""
    num_holders: int = 0
    """The response and the later turns that need it."""

    @property
    def num_bytes(self) -> int:
        """Bytes counted for it."""
        texts = (self.messages, self.input_items, self.output_items)
        return sum(map(len, texts)) + self.num_image_bytes + OVERHEAD_BYTES

    @property
    def num_image_bytes(self) -> int:
        """Bytes of its images."""
        return sum(len(image.data) + len(image.url) for image in self.images)


@dataclass(frozen=True, slots=True)
class _Entry:
    owner: str
    response_id: str
    body: bytes
    turn: Turn
    stored_s: float


@dataclass(slots=True)
class _Share:
    """The part of the store that one owner uses."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    """Oldest first."""
    num_bytes: int = 0


class ResponseStore:
    """Responses by owner and id.

    Responses of one conversation share its earlier turns, which stay until the last of them goes.
    When the store is full, the owner with the most gives up its oldest, so that no key drives
    another's responses out.
    """

    def __init__(self, limits: StoreLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts empty; `clock` returns seconds."""
        self._limits = limits
        self._clock = clock
        self._shares: dict[str, _Share] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether it keeps anything."""
        return self._limits.max_responses > 0

    @property
    def num_responses(self) -> int:
        """Responses that are kept."""
        return sum(len(share.entries) for share in self._shares.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that are counted."""
        return sum(share.num_bytes for share in self._shares.values())

    def put(
        self,
        owner: str,
        response_id: str,
        body: bytes,
        messages: Sequence[Message],
        previous: Turn | None,
        *,
        input_items: bytes = b"[]",
        output_items: bytes = b"[]",
    ) -> None:
        """Keeps a response in JSON, and what it adds to the conversation of `previous`."""
        self.expire()
        turn = Turn(
            json.dumps(without_files(messages)).encode(),
            images_of(messages),
            len(messages),
            previous,
            input_items,
            output_items,
        )
        num_bytes = len(body) + turn.num_bytes
        if num_bytes > self._limits.max_bytes or not self.is_enabled:
            log.info("response_not_stored", num_bytes=num_bytes, limit=self._limits.max_bytes)
            return
        share = self._shares.setdefault(owner, _Share())
        if response_id in share.entries:
            self._remove(share.entries[response_id])
            share = self._shares.setdefault(owner, _Share())
        share.entries[response_id] = _Entry(owner, response_id, body, turn, self._clock())
        share.num_bytes += len(body)
        _hold(share, turn)
        while self.num_responses > self._limits.max_responses:
            self._remove_oldest(max(self._shares.values(), key=lambda each: len(each.entries)))
        while self.num_bytes > self._limits.max_bytes:
            self._remove_oldest(max(self._shares.values(), key=lambda each: each.num_bytes))

    def body(self, owner: str, response_id: str) -> bytes:
        """Returns a response in JSON.

        Raises:
            UnknownResponseError: the owner has none with this id.
        """
        return self._find(owner, response_id, field=None).body

    def input_items(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Returns the items that led to a response, those of earlier turns included, oldest first.

        Raises:
            UnknownResponseError: the owner has none with this id.
        """
        turn: Turn | None = self._find(owner, response_id, field=None).turn
        items: list[dict[str, Any]] = []
        is_last = True
        while turn is not None:
            output = [] if is_last else json.loads(turn.output_items)
            items = [*json.loads(turn.input_items), *output, *items]
            turn, is_last = turn.previous, False
        return items

    def turn(self, owner: str, response_id: str) -> Turn:
        """Returns the last turn of a response's conversation.

        Raises:
            UnknownResponseError: the owner has none with this id.
        """
        return self._find(owner, response_id, field="previous_response_id").turn

    def messages_to(self, turn: Turn | None) -> list[Message]:
        """Returns the messages of a conversation up to a turn, oldest first.

        Raises:
            InvalidRequestError: there are too many.
        """
        turns: list[Turn] = []
        num_bytes = num_messages = num_image_bytes = 0
        while turn is not None:
            turns.append(turn)
            num_bytes += len(turn.messages)
            num_messages += turn.num_messages
            num_image_bytes += turn.num_image_bytes
            limit = self._limits.max_conversation_bytes
            if num_image_bytes > self._limits.max_conversation_image_bytes:
                raise InvalidRequestError(
                    f"the conversation has over {self._limits.max_conversation_image_bytes} bytes"
                    " of images, which is the limit",
                    field="previous_response_id",
                )
            if num_messages > MAX_MESSAGES or num_bytes > limit:
                raise InvalidRequestError(
                    f"the conversation has over {MAX_MESSAGES} messages or {limit} bytes, which"
                    " are the limits",
                    field="previous_response_id",
                )
            turn = turn.previous
        return [
            message
            for each in reversed(turns)
            for message in with_files(json.loads(each.messages), each.images)
        ]

    def delete(self, owner: str, response_id: str) -> None:
        """Forgets a response; later ones of its conversation keep its turn.

        Raises:
            UnknownResponseError: the owner has none with this id.
        """
        self._remove(self._find(owner, response_id, field=None))

    def expire(self) -> None:
        """Forgets responses over the age limit."""
        oldest_s = self._clock() - self._limits.max_age_s
        for share in list(self._shares.values()):
            for entry in list(share.entries.values()):
                if entry.stored_s > oldest_s:
                    break
                self._remove(entry)

    async def watch(self) -> None:
        """Expires responses until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.expire()

    def _find(self, owner: str, response_id: str, *, field: str | None) -> _Entry:
        if not self.is_enabled:
            raise UnknownResponseError(
                "this server stores no responses: send all items of the conversation in input",
                field=field,
            )
        self.expire()
        share = self._shares.get(owner)
        entry = None if share is None else share.entries.get(response_id)
        if entry is None:
            raise UnknownResponseError(
                f"there is no response {response_id[:MAX_SHOWN_CHARACTERS]!r}: it was not stored,"
                " was deleted, or is over a limit of the store",
                field=field,
            )
        return entry

    def _remove_oldest(self, share: _Share) -> None:
        self._remove(next(iter(share.entries.values())))

    def _remove(self, entry: _Entry) -> None:
        share = self._shares[entry.owner]
        del share.entries[entry.response_id]
        share.num_bytes -= len(entry.body)
        _release(share, entry.turn)
        if not share.entries:
            assert not share.num_bytes, "turns are held by responses alone"
            del self._shares[entry.owner]


def _hold(share: _Share, turn: Turn | None) -> None:
    """Adds a holder; a turn without others is counted, and holds the one before it."""
    while turn is not None:
        turn.num_holders += 1
        if turn.num_holders > 1:
            return
        share.num_bytes += turn.num_bytes
        turn = turn.previous


def _release(share: _Share, turn: Turn | None) -> None:
    """Removes a holder; the last one's turn is uncounted, and releases the one before it."""
    while turn is not None:
        turn.num_holders -= 1
        if turn.num_holders:
            return
        share.num_bytes -= turn.num_bytes
        turn = turn.previous
