"""Bounds what a protobuf message holds, on its bytes, before it is parsed.

A field of two bytes becomes an object, so 16 MiB can hold 8 million of them, which take seconds to
parse, check and convert. This walk stops at the limit: it costs the same for every larger message.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
"""Wire types."""
_MAX_VARINT_BYTES = 10


class MalformedMessageError(Exception):
    """The bytes are not a message of the method's type."""


class MessageTooLargeError(MalformedMessageError):
    """The message holds more than may be parsed."""


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of one message, whatever its size in bytes."""

    max_fields: int = 16_384
    """Fields at all depths. A conversation of 4096 messages has 12,288."""
    max_text_bytes: int = 4 * 2**20
    """UTF-8 of all string fields together; these bytes are checked and copied."""
    max_packed_bytes: int = 5 * 2**20
    """Packed numbers of all fields together; a token id takes one to five bytes."""


_Layout = dict[int, Any]
"""Layout of a message type: by tag, the layout of a message, or _TEXT or _PACKED."""
_TEXT, _PACKED = "text", "packed"
_UNKNOWN_GROUP: _Layout = {}
"""Fields inside a group: the parser skips them, so none is a message to walk into."""
_LAYOUTS: dict[Any, _Layout] = {}


def _layout_of(descriptor: Any) -> _Layout:
    layout = _LAYOUTS.get(descriptor)
    if layout is None:
        layout = _LAYOUTS[descriptor] = {}  # before its fields: a message may contain its own type
        for field in descriptor.fields:
            tag = field.number << 3 | _BYTES
            if field.message_type is not None:
                layout[tag] = _layout_of(field.message_type)
            elif field.type == FieldDescriptor.TYPE_STRING:
                layout[tag] = _TEXT
            elif field.is_repeated and field.type != FieldDescriptor.TYPE_BYTES:
                layout[tag] = _PACKED
    return layout


def check_message(data: bytes, message_class: type[Message], limits: MessageLimits) -> None:
    """Checks a message's bytes; bytes that are no message are left to the parser.

    The parser reads in the same order and stops where this walk does, so it has not seen more
    fields than were counted here.

    Raises:
        MessageTooLargeError: the message holds more than the limits allow.
    """
    with suppress(IndexError):  # the bytes end inside a field
        _walk(data, _layout_of(message_class.DESCRIPTOR), limits)


def _walk(data: bytes, layout: _Layout, limits: MessageLimits) -> None:  # noqa: PLR0912, C901
    """Counts fields one by one. One function, because each call would cost as much as a field."""
    num_fields = num_text_bytes = num_packed_bytes = 0
    position, end = 0, len(data)
    outer: list[tuple[int, _Layout]] = []
    while True:
        while position >= end:
            if not outer or position > end or layout is _UNKNOWN_GROUP:
                return
            end, layout = outer.pop()
        tag = data[position]
        position += 1
        if tag >= 0x80:
            tag, position = _read_varint(data, position - 1)
        num_fields += 1
        if num_fields > limits.max_fields:
            raise MessageTooLargeError(f"the message has over {limits.max_fields} fields")
        wire_type = tag & 7
        if wire_type == _BYTES:
            length = data[position]
            position += 1
            if length >= 0x80:
                length, position = _read_varint(data, position - 1)
            stop = position + length
            if stop > end:
                return
            kind = layout.get(tag)
            if kind is _TEXT:
                num_text_bytes += length
                _check(num_text_bytes, limits.max_text_bytes, "text")
            elif kind is _PACKED:
                num_packed_bytes += length
                _check(num_packed_bytes, limits.max_packed_bytes, "numbers")
            elif kind is not None:
                outer.append((end, layout))
                layout, end = kind, stop
                continue
            position = stop
        elif wire_type == _VARINT:
            if data[position] < 0x80:
                position += 1
            else:
                _, position = _read_varint(data, position)
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _GROUP:
            outer.append((end, layout))
            layout = _UNKNOWN_GROUP
        elif wire_type == _GROUP_END and layout is _UNKNOWN_GROUP:
            end, layout = outer.pop()
        else:
            return


def _check(num_bytes: int, limit: int, what: str) -> None:
    if num_bytes > limit:
        raise MessageTooLargeError(
            f"the message has over {limit} bytes of {what}, which is the limit"
        )


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a number and the position after it.

    Raises:
        IndexError: no number is there.
    """
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        byte = data[position + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise IndexError("a number of more than ten bytes")


def first_number(data: bytes, field_number: int, *, max_fields: int = 16) -> int | None:
    """Returns a number among the first fields of a message that is not parsed, None without one."""
    position = 0
    try:
        for _ in range(max_fields):
            tag, position = _read_varint(data, position)
            wire_type = tag & 7
            if wire_type == _VARINT:
                value, position = _read_varint(data, position)
                if tag >> 3 == field_number:
                    return value
            elif wire_type == _BYTES:
                length, position = _read_varint(data, position)
                position += length
            elif wire_type in (_FIXED32, _FIXED64):
                position += 4 if wire_type == _FIXED32 else 8
            else:
                return None
    except IndexError:
        return None
    return None
