"""OTLP's messages with `bytes` where parsing can wait, so that protobuf's C core only slices.

The field numbers are those of OTLP 1.x (trace/v1, logs/v1, common/v1). Text is declared as bytes too: invalid UTF-8
must not fail a span. A message field that is sliced is declared repeated, because protobuf merges one that occurs
twice: the joined slices are the merged message. Unknown fields are skipped.
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

_KINDS: Final[dict[str, "_Field.Type.ValueType"]] = {
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "int64": _Field.TYPE_INT64,
    "double": _Field.TYPE_DOUBLE,
    "fixed32": _Field.TYPE_FIXED32,
    "fixed64": _Field.TYPE_FIXED64,
}

_MESSAGES: Final[dict[str, str]] = {
    "Traces": "1 repeated ResourceSpans groups",
    "ResourceSpans": "1 optional Resource resource, 2 repeated ScopeSpans scopes",
    "ScopeSpans": "1 optional Scope scope, 2 repeated Span items",
    "Logs": "1 repeated ResourceLogs groups",
    "ResourceLogs": "1 optional Resource resource, 2 repeated ScopeLogs scopes",
    "ScopeLogs": "1 optional Scope scope, 2 repeated LogRecord items",
    # What traces and logs have in common, for telling one from the other and for cutting requests into smaller ones.
    "Outline": "1 repeated OutlineGroup groups",
    "OutlineGroup": "1 repeated bytes resource, 2 repeated OutlineScope scopes",
    "OutlineScope": "1 repeated bytes scope, 2 repeated bytes items",
    "Resource": "1 repeated bytes attributes",
    "Scope": "1 optional bytes name",
    "Span": """1 optional bytes trace_id, 2 optional bytes span_id, 3 optional bytes trace_state,
        4 optional bytes parent_span_id, 5 optional bytes name, 6 optional int32 kind,
        7 optional fixed64 start_time_unix_nano, 8 optional fixed64 end_time_unix_nano, 9 repeated bytes attributes,
        10 optional uint32 dropped_attributes_count, 11 repeated bytes events, 12 optional uint32 dropped_events_count,
        13 repeated bytes links, 14 optional uint32 dropped_links_count, 15 optional Status status,
        16 optional fixed32 flags""",
    "Status": "2 optional bytes message, 3 optional int32 code",
    "Event": "1 optional fixed64 time_unix_nano, 2 optional bytes name, 3 repeated bytes attributes",
    "Link": "1 optional bytes trace_id, 2 optional bytes span_id, 4 repeated bytes attributes",
    "LogRecord": """1 optional fixed64 time_unix_nano, 2 optional int32 severity_number, 3 optional bytes severity_text,
        5 repeated bytes body, 6 repeated bytes attributes, 7 optional uint32 dropped_attributes_count,
        8 optional fixed32 flags, 9 optional bytes trace_id, 10 optional bytes span_id,
        11 optional fixed64 observed_time_unix_nano, 12 optional bytes event_name""",
    "KeyValue": "1 optional bytes key, 2 optional AnyValue value",
    "AnyValue": """1 oneof bytes string_value, 2 oneof bool bool_value, 3 oneof int64 int_value,
        4 oneof double double_value, 5 oneof ArrayValue array_value, 6 oneof KeyValueList kvlist_value,
        7 oneof bytes bytes_value, 8 oneof int32 string_value_strindex""",
    "ArrayValue": "1 repeated AnyValue values",
    "KeyValueList": "1 repeated KeyValue values",
    # The merge trick: a singular message whose field is repeated. Protobuf has to merge all elements of an array into
    # it, which leaves their numbers in one flat buffer. 32 bits of each are enough for token ids.
    "MergedArray": "1 optional MergedElement values",
    "MergedElement": "3 repeated int32 int_value",
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="spanmill/otlp.proto", package="spanmill", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in fields.split(","):
            number, label, kind, field_name = line.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = _Field.LABEL_REPEATED if label == "repeated" else _Field.LABEL_OPTIONAL
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".spanmill.{kind}"
            if label == "oneof":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                field.oneof_index = 0
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())


def _message(name: str) -> Any:
    """The class of a message; its attributes are made at run time, so no type checker knows them."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"spanmill.{name}"))


Traces: Final = _message("Traces")
Logs: Final = _message("Logs")
Outline: Final = _message("Outline")
Span: Final = _message("Span")
Event: Final = _message("Event")
Link: Final = _message("Link")
LogRecord: Final = _message("LogRecord")
KeyValue: Final = _message("KeyValue")
AnyValue: Final = _message("AnyValue")
MergedArray: Final = _message("MergedArray")
