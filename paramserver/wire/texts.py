"""The texts of a message made harmless for people (see `core.shown`)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paramserver.core.shown import one_line

M = TypeVar("M", bound=Message)


def harmless(message: M) -> M:
    """A copy of the message in which each text is one line that steers no terminal. Text in JSON stays JSON."""
    copy = type(message)()
    copy.CopyFrom(message)
    _clean(copy)
    return copy


def _clean(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _clean_map(field, value)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                setattr(message, field.name, one_line(value))
            else:
                value[:] = [one_line(text) for text in value]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in [value] if isinstance(value, Message) else value:
                _clean(one)


def _clean_map(field: FieldDescriptor, value: object) -> None:
    assert isinstance(value, MutableMapping)
    assert field.message_type is not None
    content = field.message_type.fields_by_name["value"]
    if content.type == FieldDescriptor.TYPE_MESSAGE:
        for one in value.values():
            _clean(one)
        return
    pairs = list(value.items())
    value.clear()
    for key, one in pairs:
        name = one_line(key) if isinstance(key, str) else key
        value[name] = one_line(one) if isinstance(one, str) else one
