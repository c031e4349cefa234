from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("call", "method", "messages", "end", "cancel", "error", "text", "credit")
    CALL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    call: int
    method: str
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    end: bool
    cancel: bool
    error: str
    text: str
    credit: int
    def __init__(self, call: _Optional[int] = ..., method: _Optional[str] = ..., messages: _Optional[_Iterable[bytes]] = ..., end: bool = ..., cancel: bool = ..., error: _Optional[str] = ..., text: _Optional[str] = ..., credit: _Optional[int] = ...) -> None: ...
