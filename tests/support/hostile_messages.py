"""Messages that only an attacker sends: random bytes, damaged messages, wild values in each field.

Everything depends on the random generator that is passed in, so a run can be repeated.
"""

import random
from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import strategies as st

MAX_DEPTH = 5
_TEXTS = (
    *("", "a", "tiny", "user", "x" * 129, "x" * 5000, "\0", "\u202eabc", "\U0001f4a5" * 60),
    *(
        "<|im_start|>",
        "<|im_end|>" * 9,
        "{{ 7 * 7 }}",
        "{% for a in b %}",
        "%s%n",
        "\ufeff",
        "ß" * 257,
    ),
)
_WHOLE = (0, 1, 2, 3, 7, 20, 21, 64, 255, 1023, 1024, 2**16, 2**31 - 1)
_REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, float("nan"), float("inf"), float("-inf"))
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


class HostileMessages:
    """Makes payloads from messages that a service would take."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._damages: list[Callable[[bytes], bytes]] = [
            self._flip,
            self._cut,
            self._splice,
            self._repeat,
            self._append_field,
            self._lie_about_length,
        ]

    def payload(self, seed: Message) -> bytes:
        """Returns bytes for the method that takes messages like `seed`."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.1:
            return rng.randbytes(rng.choice((0, 1, 2, 5, 17, 64, 300)))
        wild = self.wild(seed)
        data = wild.SerializeToString()
        if kind < 0.5:
            return data
        for _ in range(rng.randint(1, 3)):
            data = rng.choice(self._damages)(data)
        return data

    def wild(self, seed: Message) -> Message:
        """Returns a message like `seed` with wild values in a few fields, at any depth."""
        message = type(seed)()
        message.CopyFrom(seed)
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 4))):
            self._spoil(message, 0)
        return message

    def _spoil(self, message: Message, depth: int) -> None:
        rng = self._rng
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = rng.choice(fields)
        if rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._extend(message, field, depth)
        elif field.message_type is not None:
            if depth < MAX_DEPTH:
                child = getattr(message, field.name)
                child.SetInParent()
                self._spoil(child, depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _extend(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        items = getattr(message, field.name)
        count = self._rng.choice((1, 1, 2, 5, 70, 1030))
        if field.message_type is None:
            items.extend(self._value(field) for _ in range(count))
        elif field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for _ in range(count):
                if value.message_type is None:
                    items[self._value(key)] = self._value(value)
                elif depth < MAX_DEPTH:
                    self._spoil(items[self._value(key)], depth + 1)
        elif depth < MAX_DEPTH:
            for _ in range(min(count, 70)):
                self._spoil(items.add(), depth + 1)

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice(_REAL) if rng.random() < 0.7 else rng.uniform(-3, 3)
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return rng.randbytes(rng.choice((0, 3, 4, 8, 400)))
                return rng.choice(_TEXTS)
        low, high = _BITS[field.cpp_type]
        return rng.choice((*_WHOLE, low, high, rng.randint(low, high)))

    def _flip(self, data: bytes) -> bytes:
        damaged = bytearray(data or b"\0")
        for _ in range(self._rng.randint(1, 4)):
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
        return bytes(damaged)

    def _cut(self, data: bytes) -> bytes:
        return data[: self._rng.randint(0, len(data))]

    def _splice(self, data: bytes) -> bytes:
        at = self._rng.randint(0, len(data))
        return data[:at] + self._rng.randbytes(self._rng.randint(1, 12)) + data[at:]

    def _repeat(self, data: bytes) -> bytes:
        return data * self._rng.randint(2, 4)

    def _append_field(self, data: bytes) -> bytes:
        """Adds a small number under a field that may exist, of this type or of another."""
        return data + bytes((self._rng.randrange(1, 16) << 3, self._rng.randrange(128)))

    def _lie_about_length(self, data: bytes) -> bytes:
        """Adds a field that claims more bytes than follow."""
        return data + bytes((self._rng.randrange(1, 16) << 3 | 2, 0xFF, 0xFF, 0xFF, 0x7F)) + b"ab"


def is_taken_whole(data: bytes, message_class: type[Message]) -> bool:
    """Whether bytes are a message of this class without a field that it does not know."""
    try:
        return not len(UnknownFieldSet(message_class.FromString(data)))
    except DecodeError:
        return False


def any_message(message_class: type[Message], depth: int = 0) -> st.SearchStrategy[Any]:
    """A hypothesis strategy for every message of a class, in its whole range."""
    optional = {
        field.name: strategy
        for field in message_class.DESCRIPTOR.fields
        if (strategy := _any_field(field, depth)) is not None
    }
    return st.fixed_dictionaries({}, optional=optional).map(lambda values: message_class(**values))


def _any_field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    if field.message_type is None:
        value = _any_value(field)
        return st.lists(value, max_size=8) if field.is_repeated else value
    if depth == MAX_DEPTH:
        return None
    if field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        values = _any_field(value, depth + 1)
        return None if values is None else st.dictionaries(_any_value(key), values, max_size=4)
    message = any_message(message_factory.GetMessageClass(field.message_type), depth + 1)
    return st.lists(message, max_size=3) if field.is_repeated else message


def _any_value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats()
        case FieldDescriptor.CPPTYPE_STRING:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            return st.binary(max_size=64) if is_bytes else st.text(max_size=40)
    low, high = _BITS[field.cpp_type]
    # Small numbers are where a request is taken; the whole range is where it should not be.
    return st.one_of(st.integers(max(low, 0), min(high, 40)), st.integers(low, high))
