"""Operations and how Abacus reasons about them.

One column at a time, so that every step is a fact about single digits.
"""

from collections.abc import Callable
from dataclasses import dataclass

COLUMNS = ("Ones", "Tens", "Hundreds")


@dataclass(frozen=True)
class Operation:
    """`left sign right`; the sign is one of + - * or ? for a comparison."""

    sign: str
    left: int
    right: int

    @property
    def result(self) -> int:
        """The exact value; a comparison has none and gives the sign of the difference."""
        if self.sign == "+":
            return self.left + self.right
        if self.sign == "*":
            return self.left * self.right
        return self.left - self.right

    @property
    def expression(self) -> str:
        """The form a calculator takes."""
        return f"{self.left}{self.sign}{self.right}"

    @property
    def answer(self) -> str:
        """The form the model answers in."""
        return f"{self.left} {self.sign} {self.right} = {self.result}"


def digits_of(number: int, num_columns: int) -> list[int]:
    """Digits from the ones upward, padded with zeros."""
    return [number // 10**column % 10 for column in range(num_columns)]


def num_columns_of(*numbers: int) -> int:
    """Columns needed to write the longest of the numbers."""
    return max(len(str(number)) for number in numbers)


def explain_sum(left: int, right: int) -> str:
    """`Ones: 7+5=12, carry 1. Tens: 4+8+1=13. So 132.`"""
    num_columns = num_columns_of(left, right)
    carry, steps = 0, []
    pairs = zip(digits_of(left, num_columns), digits_of(right, num_columns), strict=True)
    for column, (a, b) in enumerate(pairs):
        total = a + b + carry
        step = f"{COLUMNS[column]}: {a}+{b}{'+1' if carry else ''}={total}"
        carry = total // 10
        more = carry and column + 1 < num_columns
        steps.append(step + (", carry 1." if more else "."))
    return " ".join([*steps, f"So {left + right}."])


def explain_difference(left: int, right: int) -> str:
    """`Ones: 12-5=7, borrow 1. Tens: 4-1-1=2. So 27.`; the larger number always goes first."""
    if left < right:
        turned = explain_difference(right, left).rsplit(" So ", 1)[0]
        return f"{left} < {right}, so -({right}-{left}). {turned} So {left - right}."
    num_columns = num_columns_of(left, right)
    borrow, steps = 0, []
    pairs = zip(digits_of(left, num_columns), digits_of(right, num_columns), strict=True)
    for column, (a, b) in enumerate(pairs):
        below = a - b - borrow < 0
        top = a + 10 if below else a
        step = f"{COLUMNS[column]}: {top}-{b}{'-1' if borrow else ''}={top - b - borrow}"
        steps.append(step + (", borrow 1." if below else "."))
        borrow = int(below)
    return " ".join([*steps, f"So {left - right}."])


def explain_product(left: int, right: int) -> str:
    """Column by column for one long factor; through the tens for two of them."""
    if left < 10 and right < 10:
        return f"{left}*{right}={left * right}."
    if left >= 10 and right >= 10:
        rest = right - 10
        parts = f"{left}*10={left * 10}. {left}*{rest}={left * rest}."
        return f"{parts} {left * 10}+{left * rest}={left * right}."
    if left < right:
        return f"{left}*{right}={right}*{left}. {explain_product(right, left)}"
    tens, ones = divmod(left, 10)
    carry = ones * right // 10
    step = f"Ones: {ones}*{right}={ones * right}{f', carry {carry}' if carry else ''}."
    more = f", {tens * right}+{carry}={tens * right + carry}" if carry else ""
    return f"{step} Tens: {tens}*{right}={tens * right}{more}. So {left * right}."


def relation(left: int, right: int) -> str:
    """The sign that makes `left ? right` true."""
    return "<" if left < right else ">" if left > right else "="


def explain_comparison(left: int, right: int) -> str:
    """By length first, then digit by digit from the left."""
    end = f"So {left} {relation(left, right)} {right}."
    a, b = str(left), str(right)
    if len(a) != len(b):
        return f"{left} has {len(a)} digit{'s' * (len(a) > 1)}, {right} has {len(b)}. {end}"
    steps = []
    for x, y in zip(a, b, strict=True):
        steps.append(f"{x} {relation(int(x), int(y))} {y}")
        if x != y:
            break
    return f"{', '.join(steps)}. {end}"


def explain(operation: Operation) -> str:
    """The reasoning for any operation."""
    explainers: dict[str, Callable[[int, int], str]] = {
        "+": explain_sum,
        "-": explain_difference,
        "*": explain_product,
        "?": explain_comparison,
    }
    return explainers[operation.sign](operation.left, operation.right)
