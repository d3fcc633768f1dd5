"""LiteLLM, by the OpenAI client and by its own transport: one whole answer each, one streamed."""

import os
import sys

import litellm


def main(question: str) -> None:
    """Print the answers."""
    for provider in ("openai", "hosted_vllm"):
        request = {
            "model": f"{provider}/{os.environ['MODEL']}",
            "api_base": os.environ["OPENAI_BASE_URL"],
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
        }
        print(litellm.completion(**request).choices[0].message.content)
        print("".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**request, stream=True)))


if __name__ == "__main__":
    main(sys.argv[1])
