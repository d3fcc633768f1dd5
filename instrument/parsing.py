"""Answers off the wire as JSON values, by the parser that the client library has loaded, if it has.

pydantic's takes half the time of `json` on long lists, which is what ids are. It refuses what `json` takes (half a
surrogate pair), so the last word is not its.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from operator import itemgetter
from typing import Any

Parser = Callable[[bytes], Any]


def parse(content: bytes, *, with_logprobs: bool = True) -> Any:
    """A JSON value; None for what is none, which is none of our business.

    Without `with_logprobs` a chat answer may have its logprobs as completions have them, in a list `token_logprobs`,
    for a program that does not get to see them: three objects for each token make the garbage collector run.
    """
    loaded: Any = sys.modules.get("pydantic_core")
    parsers: list[Parser] = [json.loads]
    if hasattr(loaded, "from_json"):
        parsers.insert(0, loaded.from_json)
    if loaded is not None and not with_logprobs:
        parsers.insert(0, _numbers_alone(loaded))
    for parser in parsers:
        with suppress(ValueError):
            return parser(content)
    return None


@cache
def _numbers_alone(loaded: Any) -> Parser:
    """Takes a chat answer, and raises ValueError for one of another shape, an error for one."""
    make = loaded.core_schema
    token = make.no_info_after_validator_function(
        itemgetter("logprob"),
        make.typed_dict_schema({"logprob": make.typed_dict_field(make.any_schema())}, extra_behavior="ignore"),
    )
    logprobs = make.typed_dict_schema(
        {"token_logprobs": make.typed_dict_field(make.list_schema(token), validation_alias="content")},
        extra_behavior="ignore",
    )
    choice = make.typed_dict_schema(
        {"logprobs": make.typed_dict_field(make.nullable_schema(logprobs), required=False)}, extra_behavior="allow"
    )
    answer = make.typed_dict_schema(
        {"choices": make.typed_dict_field(make.list_schema(choice))}, extra_behavior="allow"
    )
    return loaded.SchemaValidator(answer).validate_json
