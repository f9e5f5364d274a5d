"""Problems for Abacus, the tiny model that ships with Tetrad.

One generator serves training, evaluation and tests, so it knows no torch and no tokenizer. A
problem is a conversation that waits for an answer, together with the answer a perfect model gives.
Training and held-out problems never share an operation: a hash of the operands decides the side,
whatever the phrasing and whatever the direction of a commutative operation, so held-out accuracy
measures arithmetic and not memory.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tetrad.bench.eval import phrases
from tetrad.bench.eval.arithmetic import Operation, explain, relation

Message = dict[str, Any]

HELD_OUT_SHARE = 16  # one operation in sixteen is never trained on
DEMO_OPERATION = ("+", 3, 5)  # the README's own question is allowed in training


@dataclass(frozen=True)
class Problem:
    """A conversation that ends with a user or tool turn, and the reply that would be right."""

    kind: str
    messages: list[Message]
    reply: Message
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True

    @property
    def expected(self) -> str:
        """The visible answer, or the expression of the tool call."""
        calls = self.reply.get("tool_calls")
        if calls:
            return str(calls[0]["function"]["arguments"]["expression"])
        return str(self.reply["content"])


def is_held_out(operation: Operation) -> bool:
    """Which side of the split an operation is on. Commuted operands fall on the same side."""
    left, right = operation.left, operation.right
    if operation.sign != "-" and left > right:
        left, right = right, left
    if (operation.sign, left, right) == DEMO_OPERATION or is_table_fact(operation):
        return False
    return zlib.crc32(f"{operation.sign}:{left}:{right}".encode()) % HELD_OUT_SHARE == 0


def is_table_fact(operation: Operation) -> bool:
    """Single-digit products and the nine of 10 to 12 squared are taught, not deduced."""
    low, high = sorted((operation.left, operation.right))
    return operation.sign == "*" and (high < 10 or low >= 10)


# --- Drawing operations ---------------------------------------------------------------------------


def draw_number(rng: random.Random, max_digits: int) -> int:
    """Lengths are drawn first, so short numbers are not rare; the longest count double."""
    weights = [1] * (max_digits - 1) + [2]
    num_digits = rng.choices(range(1, max_digits + 1), weights)[0]
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def draw_factors(rng: random.Random) -> tuple[int, int]:
    """Up to 12 x 12, or two digits times one, in either order."""
    if rng.random() < 0.35:
        return rng.randrange(13), rng.randrange(13)
    pair = (rng.randrange(10, 100), rng.randrange(2, 10))
    return pair if rng.random() < 0.6 else pair[::-1]


def draw_compared(rng: random.Random, max_digits: int) -> tuple[int, int]:
    """Mostly free; often close together, where a comparison is hard; sometimes equal."""
    left = draw_number(rng, max_digits)
    roll = rng.random()
    if roll < 0.05:
        return left, left
    if roll < 0.35:
        return left, max(0, min(10**max_digits - 1, left + rng.randrange(-12, 13)))
    return left, draw_number(rng, max_digits)


def draw_operation(rng: random.Random, sign: str, max_digits: int, held_out: bool) -> Operation:
    """An operation from one side of the split."""
    while True:
        if sign == "*" and max_digits <= 3:
            left, right = draw_factors(rng)
        elif sign == "?":
            left, right = draw_compared(rng, max_digits)
        else:
            left, right = draw_number(rng, max_digits), draw_number(rng, max_digits)
        operation = Operation(sign, left, right)
        if is_held_out(operation) == held_out:
            return operation


# --- Conversations --------------------------------------------------------------------------------


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(content: str, reasoning: str | None = None) -> Message:
    """An assistant turn, with its reasoning where there is one."""
    turn = {"role": "assistant", "content": content}
    return turn if reasoning is None else {**turn, "reasoning_content": reasoning}


def ask(rng: random.Random, operation: Operation) -> tuple[str, str]:
    """A question in one of many phrasings, and its answer."""
    left, right = operation.left, operation.right
    if operation.sign != "?":
        pattern = rng.choice(phrases.QUESTIONS[operation.sign])
        return phrases.vary(rng, pattern.format(a=left, b=right)), operation.answer
    pattern, wanted = rng.choice(phrases.COMPARISONS)
    question = phrases.vary(rng, pattern.format(a=left, b=right))
    return question, compare(wanted, left, right)


def compare(wanted: str, left: int, right: int) -> str:
    """The answer to a comparison: `larger`, `smaller`, `>` and `<` say what was asked."""
    found = relation(left, right)
    if wanted in "<>":
        return f"{'Yes' if found == wanted else 'No'}, {left} {found} {right}."
    if found == "=":
        return "They are equal."
    return f"{max(left, right) if wanted == 'larger' else min(left, right)} is {wanted}."


def arithmetic(
    kind: str, sign: str, max_digits: int, thinking: bool
) -> Callable[[random.Random, bool], Problem]:
    """A maker of single questions with one operation."""

    def make(rng: random.Random, held_out: bool) -> Problem:
        operation = draw_operation(rng, sign, max_digits, held_out)
        question, answer = ask(rng, operation)
        reply = assistant(answer, explain(operation) if thinking else None)
        return Problem(kind, [user(question)], reply, thinking=thinking)

    return make


def make_follow_up(rng: random.Random, held_out: bool) -> Problem:
    """A sum, then `Now add 5.`: the last result is the first operand."""
    while True:
        first = draw_operation(rng, rng.choice("+-"), 3, held_out=False)
        second = Operation(rng.choice("+-"), first.result, draw_number(rng, 3))
        if 0 <= first.result <= 999 and is_held_out(second) == held_out:
            break
    question, answer = ask(rng, first)
    then = rng.choice(phrases.FOLLOW_UPS[second.sign]).format(b=second.right)
    reply = assistant(second.answer, f"The last result is {second.left}. {explain(second)}")
    turns = [user(question), assistant(answer), user(phrases.vary(rng, then))]
    return Problem("follow_up", turns, reply)


def make_history(rng: random.Random, held_out: bool) -> Problem:
    """Several finished questions, then a new one that has nothing to do with them."""
    turns: list[Message] = []
    for _ in range(rng.randrange(1, 5)):
        question, answer = ask(rng, draw_operation(rng, rng.choice("+-*?"), 3, held_out=False))
        turns += [user(question), assistant(answer)]
    operation = draw_operation(rng, rng.choice("+-*?"), 3, held_out)
    question, answer = ask(rng, operation)
    reply = assistant(answer, explain(operation))
    return Problem("history", [*turns, user(question)], reply)


def make_chat(rng: random.Random, held_out: bool) -> Problem:
    """Greetings, questions about itself, thanks, and everything it does not do."""
    while True:
        topic, text = phrases.draw_chat(rng)
        if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) == held_out:
            break
    reasoning, answer = phrases.CHAT_REPLIES[topic]
    return Problem("chat", [user(text)], assistant(answer, reasoning))


def draw_for_tool(rng: random.Random, held_out: bool) -> Operation:
    """With a calculator numbers may have four digits: the model only has to copy them."""
    return draw_operation(rng, rng.choice("+-*"), rng.choice((2, 4, 4)), held_out)


def call_calculator(operation: Operation) -> Message:
    """The assistant turn that calls the tool."""
    function = {"name": "calculator", "arguments": {"expression": operation.expression}}
    call = {"id": "call_0", "type": "function", "function": function}
    turn = assistant("", "I will use the calculator.")
    return {**turn, "tool_calls": [call]}


def make_tool_call(rng: random.Random, held_out: bool) -> Problem:
    """A question with tools, perhaps after a finished one: the right reply is one call."""
    turns: list[Message] = []
    if rng.random() < 0.25:
        turns = finished_call(rng, draw_for_tool(rng, held_out=False))
    operation = draw_for_tool(rng, held_out)
    question, _ = ask(rng, operation)
    tools = phrases.draw_tools(rng)
    return Problem("tool_call", [*turns, user(question)], call_calculator(operation), tools)


def finished_call(rng: random.Random, operation: Operation) -> list[Message]:
    """A question, the call and its result, and the answer."""
    return [*called(rng, operation, str(operation.result)), assistant(operation.answer)]


def called(rng: random.Random, operation: Operation, result: str) -> list[Message]:
    """A question, the call and its result."""
    question, _ = ask(rng, operation)
    call = call_calculator(operation)
    if rng.random() < 0.7:  # most clients do not send the reasoning back
        del call["reasoning_content"]
    return [user(question), call, {"role": "tool", "tool_call_id": "call_0", "content": result}]


def make_tool_result(rng: random.Random, held_out: bool) -> Problem:
    """The tool has answered: the right reply says what it said, even if that is wrong."""
    operation = draw_for_tool(rng, held_out)
    trusted = held_out or rng.random() < 0.7
    result = operation.result if trusted else rng.randrange(10 ** rng.randrange(1, 9))
    turns = called(rng, operation, str(result))
    answer = f"{operation.left} {operation.sign} {operation.right} = {result}"
    reply = assistant(answer, f"The calculator says {result}.")
    return Problem("tool_result", turns, reply, phrases.draw_tools(rng))


def make_lookup(rng: random.Random, held_out: bool) -> Problem:
    """A list longer than the indexer's top-k, and a question about one entry.

    Lists are random, so no held-out list is ever met in training. Training lists are asked several
    questions, because a long list with a single question teaches little for its length.
    """
    num_entries = round(2 ** rng.uniform(3.6, 5.9)) if held_out else round(2 ** rng.uniform(2, 5.9))
    keys = phrases.draw_keys(rng, num_entries)
    values = [str(draw_number(rng, 3)) for _ in keys]
    colon, separator = rng.choice(phrases.LIST_STYLES)
    listing = separator.join(f"{k}{colon}{v}" for k, v in zip(keys, values, strict=True))
    text = rng.choice(phrases.LIST_FRAMES).format(listing=listing)
    asked = rng.sample(range(num_entries), 1 if held_out else min(num_entries, rng.randrange(1, 7)))
    turns: list[Message] = []
    for index in asked:
        text += rng.choice(phrases.LIST_QUESTIONS).format(key=keys[index])
        turns += [user(text), assistant(f"{keys[index]} = {values[index]}")]
        text = ""
    entry = f"{keys[asked[-1]]}{colon}{values[asked[-1]]}"
    reply = assistant(turns.pop()["content"], f"The list says {entry}.")
    return Problem("lookup", turns, reply)


Maker = Callable[[random.Random, bool], Problem]

MAKERS: dict[str, Maker] = {
    "sum2": arithmetic("sum2", "+", 2, thinking=True),
    "sum3": arithmetic("sum3", "+", 3, thinking=True),
    "difference2": arithmetic("difference2", "-", 2, thinking=True),
    "difference3": arithmetic("difference3", "-", 3, thinking=True),
    "product": arithmetic("product", "*", 2, thinking=True),
    "comparison": arithmetic("comparison", "?", 3, thinking=True),
    "sum2_direct": arithmetic("sum2_direct", "+", 2, thinking=False),
    "sum3_direct": arithmetic("sum3_direct", "+", 3, thinking=False),
    "difference2_direct": arithmetic("difference2_direct", "-", 2, thinking=False),
    "difference3_direct": arithmetic("difference3_direct", "-", 3, thinking=False),
    "product_direct": arithmetic("product_direct", "*", 2, thinking=False),
    "comparison_direct": arithmetic("comparison_direct", "?", 3, thinking=False),
    "follow_up": make_follow_up,
    "history": make_history,
    "chat": make_chat,
    "tool_call": make_tool_call,
    "tool_result": make_tool_result,
    "lookup": make_lookup,
}

KINDS: tuple[str, ...] = tuple(MAKERS)


def held_out_problems(kind: str, count: int, seed: int = 0) -> Iterator[Problem]:
    """`count` problems of a kind that training never saw, the same for the same seed."""
    rng = random.Random(f"held-out {kind} {seed}")
    for _ in range(count):
        yield MAKERS[kind](rng, True)


def is_correct(
    kind: str, expected: str, reply_text: str, tool_calls: Sequence[dict[str, Any]] = ()
) -> bool:
    """Exact match of the visible answer, or of the one expression sent to the calculator.

    `reply_text` is the answer without its reasoning; `tool_calls` have parsed arguments.
    """
    if kind != "tool_call":
        return not tool_calls and reply_text.strip() == expected
    if len(tool_calls) != 1:
        return False
    function = tool_calls[0].get("function", tool_calls[0])
    expression = str(function.get("arguments", {}).get("expression", ""))
    return function.get("name") == "calculator" and expression.replace(" ", "") == expected
