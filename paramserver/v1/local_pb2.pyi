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

class HostShare(_message.Message):
    __slots__ = ("step", "of", "lo", "hi", "patience_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    of: int
    lo: int
    hi: int
    patience_s: float
    def __init__(self, step: _Optional[int] = ..., of: _Optional[int] = ..., lo: _Optional[int] = ..., hi: _Optional[int] = ..., patience_s: _Optional[float] = ...) -> None: ...
