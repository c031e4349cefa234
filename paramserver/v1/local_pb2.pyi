from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("call", "method", "message", "cancel", "error", "text")
    CALL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    call: int
    method: str
    message: bytes
    cancel: bool
    error: str
    text: str
    def __init__(self, call: _Optional[int] = ..., method: _Optional[str] = ..., message: _Optional[bytes] = ..., cancel: bool = ..., error: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
