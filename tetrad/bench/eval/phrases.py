"""The words around Abacus's problems: phrasings, small talk, list styles and tool descriptions."""

import random
from typing import Any

QUESTIONS = {
    "+": (
        "What is {a}+{b}?",
        "What is {a} + {b}?",
        "{a}+{b}=?",
        "{a} + {b} = ?",
        "{a}+{b}",
        "{a} + {b}",
        "What is {a} plus {b}?",
        "Compute {a} plus {b}.",
        "Compute {a}+{b}.",
        "Calculate {a} + {b}.",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} + {b}?",
        "How much is {a} plus {b}?",
        "What's {a}+{b}?",
        "Can you add {a} and {b}?",
        "Tell me {a}+{b}.",
        "Solve {a} + {b}.",
    ),
    "-": (
        "What is {a}-{b}?",
        "What is {a} - {b}?",
        "{a}-{b}=?",
        "{a} - {b} = ?",
        "{a}-{b}",
        "{a} - {b}",
        "What is {a} minus {b}?",
        "Compute {a} minus {b}.",
        "Compute {a}-{b}.",
        "Calculate {a} - {b}.",
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
        "How much is {a} - {b}?",
        "How much is {a} minus {b}?",
        "What's {a}-{b}?",
        "What is the difference {a} - {b}?",
        "Tell me {a}-{b}.",
        "Solve {a} - {b}.",
    ),
    "*": (
        "What is {a}*{b}?",
        "What is {a} * {b}?",
        "{a}*{b}=?",
        "{a} * {b} = ?",
        "{a} x {b} = ?",
        "What is {a}x{b}?",
        "What is {a} x {b}?",
        "What is {a} × {b}?",  # noqa: RUF001 (people write the real sign)
        "What is {a} times {b}?",
        "Compute {a} times {b}.",
        "Calculate {a} * {b}.",
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "What is the product of {a} and {b}?",
        "How much is {a} times {b}?",
        "What's {a}*{b}?",
        "Tell me {a}*{b}.",
        "Solve {a} * {b}.",
    ),
}

COMPARISONS = (
    ("Which is larger, {a} or {b}?", "larger"),
    ("Which is larger: {a} or {b}?", "larger"),
    ("Which is bigger, {a} or {b}?", "larger"),
    ("Which number is greater, {a} or {b}?", "larger"),
    ("What is larger, {a} or {b}?", "larger"),
    ("Which is smaller, {a} or {b}?", "smaller"),
    ("Which is smaller: {a} or {b}?", "smaller"),
    ("Which number is less, {a} or {b}?", "smaller"),
    ("What is smaller, {a} or {b}?", "smaller"),
    ("Is {a} > {b}?", ">"),
    ("Is {a}>{b}?", ">"),
    ("Is {a} larger than {b}?", ">"),
    ("Is {a} greater than {b}?", ">"),
    ("Is {a} bigger than {b}?", ">"),
    ("Is {a} < {b}?", "<"),
    ("Is {a}<{b}?", "<"),
    ("Is {a} less than {b}?", "<"),
    ("Is {a} smaller than {b}?", "<"),
)

FOLLOW_UPS = {
    "+": (
        "Now add {b}.",
        "Add {b} to that.",
        "And plus {b}?",
        "Plus {b}?",
        "And if you add {b}?",
        "Then add {b}.",
        "Add {b} more.",
    ),
    "-": (
        "Now subtract {b}.",
        "Subtract {b} from that.",
        "And minus {b}?",
        "Minus {b}?",
        "And if you subtract {b}?",
        "Then take away {b}.",
        "Take {b} away from that.",
    ),
}


def vary(rng: random.Random, text: str) -> str:
    """People forget capitals and full stops, and some are polite."""
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = text.rstrip("?.=").rstrip()
    if rng.random() < 0.06:
        text = rng.choice(("Please: ", "Hey, ", "Hi! ", "Quick question: ", "OK. ")) + text
    if rng.random() < 0.05:
        text += rng.choice((" Thanks!", " Thank you.", " Please.", "\n", " "))
    return text


# --- Small talk -----------------------------------------------------------------------------------

CHAT_REPLIES = {
    "greeting": ("This is a greeting.", "Hello! Ask me a sum, like 3+5."),
    "who": (
        "They ask about me.",
        "I am Abacus, a tiny model that comes with Tetrad. I do small arithmetic.",
    ),
    "thanks": ("They thank me.", "You are welcome!"),
    "other": ("This is not arithmetic.", "Sorry, I only do small arithmetic."),
}

GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there", "Hello there")
GREETED = ("", "!", ".", " Abacus", " Abacus!", ", Abacus.", " friend!", " you!", ", how are you?")

WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "What can you do?",
    "Tell me about yourself.",
    "Introduce yourself.",
    "Are you a model?",
    "Who made you?",
    "How can you help me?",
    "What do you do?",
)
THANKS = ("Thanks!", "Thank you.", "Thanks a lot!", "Thank you very much.", "Great, thanks.")

OTHER = (
    "What is the capital of {x}?",
    "Tell me about {x}.",
    "Write a poem about {x}.",
    "Write a story about {x}.",
    "Tell me a joke about {x}.",
    "Explain {x}.",
    "Explain {x} to a child.",
    "Translate {x} into French.",
    "How do I cook {x}?",
    "Why is {x} so popular?",
    "What is {x}?",
    "Who invented {x}?",
    "What do you think of {x}?",
    "Do you like {x}?",
    "Where can I buy {x}?",
    "When did {x} begin?",
    "Write Python code for {x}.",
    "Summarise {x}.",
    "Give me a list of {x}.",
    "What colour is {x}?",
    "How old is {x}?",
    "Describe {x} in one sentence.",
    "Can you help me with {x}?",
    "I need advice on {x}.",
    "Is {x} good?",
    "Recommend a book on {x}.",
)

WORDS = (  # noqa: SIM905 (a hundred quoted lines would hide that these are just words)
    "France Japan Brazil Canada Kenya Norway Egypt India Peru Spain weather football music jazz "
    "history physics chemistry biology painting dancing cats dogs birds horses whales bread rice "
    "soup coffee tea apples cheese chocolate rivers mountains oceans forests deserts clouds rain "
    "snow love money time sleep dreams work school travel trains planes cars bicycles computers "
    "robots phones films books poetry gardens flowers trees stars planets Mars Moon gravity light "
    "politics law medicine sports chess tennis swimming running Rome Paris London Berlin Tokyo"
).split()


def draw_chat(rng: random.Random) -> tuple[str, str]:
    """A topic of CHAT_REPLIES and something a person says on it."""
    topic = rng.choices(("greeting", "who", "thanks", "other"), (2, 2, 1, 5))[0]
    if topic == "greeting":
        text = rng.choice(GREETINGS) + rng.choice(GREETED)
    elif topic == "who":
        text = rng.choice(("", "", "Hi. ", "Hello! ", "So, ")) + rng.choice(WHO)
    elif topic == "thanks":
        text = rng.choice(("", "", "OK. ", "Nice! ", "Perfect. ")) + rng.choice(THANKS)
    else:
        subject = rng.choice(WORDS)
        if rng.random() < 0.4:
            subject += f" {rng.choice(('and', 'in', 'or', 'for', 'without'))} {rng.choice(WORDS)}"
        text = rng.choice(OTHER).format(x=subject)
    return topic, vary(rng, text)


# --- Lists ----------------------------------------------------------------------------------------

LIST_STYLES = ((": ", ", "), (": ", "\n"), (" = ", ", "), (" = ", "\n"), (": ", "; "), ("=", ", "))
LIST_FRAMES = (
    "Here is a list: {listing}. ",
    "Here is a list:\n{listing}\n",
    "Given the list {listing}. ",
    "{listing}\n",
    "Remember these values: {listing}. ",
)
LIST_QUESTIONS = (
    "What is the value of {key}?",
    "What is {key}?",
    "Which value does {key} have?",
    "Look up {key}.",
    "Find {key} in the list.",
    "Give me the value of {key}.",
)


def draw_keys(rng: random.Random, num_keys: int) -> list[str]:
    """k1 to k99 in any order, the same with another letter, mixed letters, or words."""
    style = rng.randrange(5)
    if style == 0:
        return rng.sample([word.lower() for word in WORDS], num_keys)
    if style == 1:
        return [f"k{index + 1}" for index in range(num_keys)]
    if style == 2:
        pool = [f"{letter}{number}" for letter in "abcdefghkmnpqrst" for number in range(1, 100)]
        return rng.sample(pool, num_keys)
    letter = "k" if style == 3 else rng.choice("abcdefghkmnpqrst")
    return [f"{letter}{number}" for number in rng.sample(range(1, 100), num_keys)]


# --- Tools ----------------------------------------------------------------------------------------

CALCULATOR_DESCRIPTIONS = (
    "Evaluates an arithmetic expression.",
    "Evaluate an arithmetic expression and return the result.",
    "A calculator.",
    "Compute the value of an expression such as 2+3.",
    "Useful for sums, differences and products.",
    "Calculates.",
)
EXPRESSION_DESCRIPTIONS = (
    None,
    "The expression to evaluate.",
    "The expression, for example 12+30.",
    "An arithmetic expression.",
    "What to compute",
)
OTHER_TOOLS = (
    ("get_weather", "Get the weather in a city.", "city"),
    ("search", "Search the web.", "query"),
    ("get_time", "Get the time in a time zone.", "zone"),
)


def tool(name: str, description: str, argument: str, hint: str | None) -> dict[str, Any]:
    """A function tool with one string argument, in OpenAI's form."""
    schema = {"type": "string"} if hint is None else {"type": "string", "description": hint}
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def draw_tools(rng: random.Random) -> list[dict[str, Any]]:
    """The calculator, described in one of several ways; now and then another tool beside it."""
    hint = rng.choice(EXPRESSION_DESCRIPTIONS)
    tools = [tool("calculator", rng.choice(CALCULATOR_DESCRIPTIONS), "expression", hint)]
    if rng.random() < 0.15:
        tools.insert(rng.randrange(2), tool(*rng.choice(OTHER_TOOLS), hint=None))
    return tools
