"""A chat as choices to generate: rendered, tokenised, with the readers of its answers.

All APIs that speak in messages come here: chat itself, and those that translate to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tetrad.core.errors import RequestError
from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.apis.openai.tool_grammar import chat_grammar
from tetrad.server.bodies.read import MAX_SHOWN_CHARACTERS
from tetrad.server.bodies.sampling import AnswerLimits, sampling_params, stop_strings
from tetrad.server.door.arrival import arrival
from tetrad.server.model import ServedModel
from tetrad.server.parsers.reasoning import ReasoningParser
from tetrad.server.service import Service
from tetrad.server.stream.choices import Choice, make_choices, room_for_answer
from tetrad.server.stream.session import Session
from tetrad.server.text.chat_template import End
from tetrad.server.wire.pace import beside

SHORT_CONVERSATION = 32
SHORT_CHARACTERS = 16_384
"""Rendering no more messages and characters than these, and no tools, takes less than a
millisecond."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of OpenAI's API and Anthropic's; a chat template may know others."""
REASONING_FIELDS = ("reasoning_effort", "reasoning", "thinking")


async def translated(num_parts: int, translate: Callable[[], ChatBody]) -> ChatBody:
    """What `translate` makes of another API's body of so many messages, parts and tools; in a
    thread if that may take long. Raises RequestError."""
    return translate() if num_parts <= SHORT_CONVERSATION else await beside(translate)


async def chat_choices(service: Service, body: ChatBody, answer_id: str) -> list[Choice]:
    """The choices of one chat. Raises RequestError."""
    model = service.model
    tools = body.active_tools
    prompt, ids = await chat_prompt(service, body)
    arrival().warnings += _in_vain(model, body)
    if (odd := _odd_effort(model, body)) and service.config.strict_api:
        raise RequestError(f"{odd} The server runs with --strict-api.", param="reasoning_effort")
    arrival().warnings += [odd] if odd else []
    hidden_ids = model.hidden_ids(skip_special=body.skip_special_tokens is not False)
    form, tool_format = model.reasoning_format, model.tool_format
    start = form.start(prompt) if form else None
    grammar = chat_grammar(model, body, start)

    def session(min_new_tokens: int) -> Session:
        return Session(
            model.tokenizer,
            stops=stop_strings(body),
            keep_stop=body.keeps_stop,
            min_new_tokens=min_new_tokens,
            hidden_ids=hidden_ids,
            reasoning=ReasoningParser(form, start) if form and start else None,
            tools=tool_format(tools) if tools and tool_format else None,
        )

    limits = AnswerLimits(
        max_new_tokens=body.max_new_tokens or room_for_answer(service, len(ids)),
        min_new_tokens=body.min_tokens or 0,
        num_logprobs=body.num_logprobs,
        seed=body.seed,
    )
    params = sampling_params(body, model.defaults, limits, grammar)
    return make_choices(service, answer_id, [(ids, params)], body.n or 1, session)


def _in_vain(model: ServedModel, body: ChatBody) -> Iterator[str]:
    """Sentences about fields that this model cannot heed."""
    template = model.template
    if template is None:
        return
    if body.active_tools and not template.mentions("tools"):
        yield "tools have no effect: the chat template of this model does not show them."
    elif body.active_tools and model.tool_format is None:
        yield "Calls of tools stay text: the server runs without --tool-call-parser."
    asked = [name for name in REASONING_FIELDS if getattr(body, name) is not None]
    switches = _template_variables(body.model_copy(update={"chat_template_kwargs": None}))
    is_off = model.reasoning_format is None and switches.get("enable_thinking") is False
    if asked and switches and not is_off and not template.mentions(*switches):
        yield f"{asked[0]} has no effect: the chat template of this model has no switch for it."


def _odd_effort(model: ServedModel, body: ChatBody) -> str | None:
    """A sentence about an effort that nobody knows."""
    effort = _template_variables(body).get("reasoning_effort")
    if not isinstance(effort, str) or effort in EFFORTS or model.template is None:
        return None
    if any(f"{quote}{effort}{quote}" in model.template.source for quote in "'\""):
        return None
    shown = ascii(effort[:MAX_SHOWN_CHARACTERS])
    return f"Unknown reasoning_effort {shown}; there are {', '.join(EFFORTS)}."


async def chat_prompt(service: Service, body: ChatBody) -> tuple[str, list[int]]:
    """The rendered messages and their tokens; long ones are rendered in a thread, so that other
    requests do not wait. Raises RequestError."""
    model, tools = service.model, body.active_tools
    end: End = "open" if body.continue_final_message else "turn" if body.opens_turn else "closed"

    def render() -> str:
        messages = [message.for_template() for message in body.messages]
        return model.render(messages, tools or None, _template_variables(body), end)

    prompt = render() if _is_short(body) else await beside(render)
    context_tokens = service.engine.info["context_length"]
    (ids,) = await model.encode([prompt], add_special_tokens=False, context_tokens=context_tokens)
    return prompt, ids


def _is_short(body: ChatBody) -> bool:
    if body.tools or len(body.messages) > SHORT_CONVERSATION:
        return False
    return sum(len(message.text) for message in body.messages) <= SHORT_CHARACTERS


def _template_variables(body: ChatBody) -> dict[str, Any]:
    """What the template may ask for. An effort of "none" is OpenAI's way to switch thinking off;
    templates have two names for the switch."""
    variables: dict[str, Any] = {}
    effort, is_on = body.reasoning_effort, None
    if body.reasoning is not None:
        effort = effort if effort is not None else body.reasoning.effort
        is_on = body.reasoning.enabled
    if body.thinking is not None:
        is_on = body.thinking.type == "enabled"
        if body.thinking.clear_thinking is not None:
            variables["clear_thinking"] = body.thinking.clear_thinking
    if effort is not None:
        variables["reasoning_effort"] = effort
        is_on = effort != "none" if is_on is None else is_on
    if is_on is not None:
        variables |= {"enable_thinking": is_on, "thinking": is_on}
    return variables | (body.chat_template_kwargs or {})
