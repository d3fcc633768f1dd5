"""The `anthropic` client: one whole message, one streamed."""

import os
import sys

from anthropic import Anthropic


def main(question: str) -> None:
    """Print both."""
    client = Anthropic()
    request = {
        "model": os.environ["MODEL"],
        "max_tokens": 32,
        "messages": [{"role": "user", "content": question}],
    }
    print(client.messages.create(**request).content)
    with client.messages.stream(**request) as stream:
        print("".join(stream.text_stream))


if __name__ == "__main__":
    main(sys.argv[1])
