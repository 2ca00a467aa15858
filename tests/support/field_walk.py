"""Walks the fields of protobuf messages, with values that are not their defaults."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Path = tuple[str, ...]


def leaf_paths(descriptor: Descriptor, prefix: Path = ()) -> Iterator[Path]:
    """Yields the path of every field that holds a value of its own, at any depth."""
    for field in descriptor.fields:
        path = (*prefix, field.name)
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or is_map or not field.message_type.fields:
            yield path
        else:
            yield from leaf_paths(field.message_type, path)


def set_field(message: Message, path: Path, value: Any) -> None:
    """Sets one field; a repeated message on the way gets one more entry."""
    *parents, name = path
    for parent in parents:
        child = getattr(message, parent)
        message = child.add() if _is_repeated(message, parent) else child
        message.SetInParent()
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        target = getattr(message, name)
        if isinstance(value, dict):
            target.update(value)
        else:
            del target[:]
            target.extend(value)
    elif field.message_type is not None:
        getattr(message, name).SetInParent()
    else:
        setattr(message, name, value)


def _is_repeated(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].is_repeated)
