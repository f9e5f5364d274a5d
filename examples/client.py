"""What a program asks a server: a streamed answer with its reasoning, a tool call, a choice.

Start `tetrad serve`, then run this with the server's address (http://127.0.0.1:30000 if it is left
out).
"""

from __future__ import annotations

import sys
from typing import Any

from openai import APIConnectionError, OpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def asks(question: str) -> list[Any]:
    """The messages of a question."""
    return [{"role": "user", "content": question}]


def stream(client: OpenAI, model: str) -> None:
    """Pieces of the reasoning come first, as `reasoning_content`, then those of the answer."""
    print("reasoning:", end=" ")
    has_answer = False
    for chunk in client.chat.completions.create(
        model=model, messages=asks("What is 47+85?"), temperature=0, stream=True
    ):
        for choice in chunk.choices:
            if choice.delta.content and not has_answer:
                has_answer = True
                print("\nanswer:", end=" ")
            reasoning = getattr(choice.delta, "reasoning_content", None)
            print(reasoning or choice.delta.content or "", end="", flush=True)
    print()


def call_a_tool(client: OpenAI, model: str) -> None:
    """Its arguments match their schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=asks("What is 47+85?"),
        tools=[CALCULATOR],
        tool_choice="required",
        temperature=0,
    )
    for call in answer.choices[0].message.tool_calls or []:
        if call.type == "function":
            print("tool call:", call.function.name, call.function.arguments)


def choose(client: OpenAI, model: str) -> None:
    """The answer is one of two; fields that OpenAI does not have go into `extra_body`."""
    answer = client.chat.completions.create(
        model=model,
        messages=asks("What is 3+5?"),
        temperature=0,
        extra_body={"guided_choice": ["3 + 5 = 8", "3 + 5 = 9"]},
    )
    print("chosen:", answer.choices[0].message.content)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        try:
            model = client.models.list().data[0].id
        except APIConnectionError:
            sys.exit(f"No server answers at {url}; start one with `tetrad serve`.")
        stream(client, model)
        call_a_tool(client, model)
        choose(client, model)


if __name__ == "__main__":
    main()
