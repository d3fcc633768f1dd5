# pyarrow ships no types: everything in it is Any to pyright.
from typing import Any

def __getattr__(name: str) -> Any: ...
