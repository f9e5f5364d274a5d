"""Templates render as Hugging Face renders them, in a sandbox, and their refusals are sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tetrad.core.errors import ConfigError, RequestError
from tetrad.data import embedded_model
from tetrad.server.text.chat_template import ChatTemplate

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You add <b>numbers</b>."},
    {"role": "user", "content": "What is 3+5? é"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "a tool",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": {"expression": "3+5", "n": 1}},
            }
        ],
    },
    {"role": "tool", "content": "8", "tool_call_id": "call_1"},
]
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "é & <x>"}}]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"clear_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_embedded_template_renders_as_in_hugging_face(kwargs: dict[str, Any], tools: Any):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(embedded_model()).apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
    )
    ours = ChatTemplate.from_folder(embedded_model())
    assert ours is not None
    assert ours.render(CONVERSATION, tools, kwargs) == theirs


def test_the_environment_is_the_one_templates_were_written_for():
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index == 2 %}\n{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ bos_token }}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"a": "é<"}, {"b": 1}]).strip() == '{"a": "é<"}\n    <s>4'.replace(
        "\n    ", ""
    )


def test_a_refusal_of_the_template_is_a_request_error():
    template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(RequestError, match=r"refused these messages: Roles must alternate\."):
        template.render([])


@pytest.mark.parametrize("source", ["{{ messages[3].x.y }}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}"])
def test_what_breaks_while_rendering_is_a_request_error(source: str):
    with pytest.raises(RequestError, match="refused these messages"):
        ChatTemplate(source).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_holds(source: str):
    with pytest.raises(RequestError):
        ChatTemplate(source).render([])


def write(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_where_the_template_is_found(tmp_path: Path):
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, chat_template="one {{ eos_token }}", eos_token={"content": "</s>"})
    assert rendered(tmp_path) == "one </s>"
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}]
    write(tmp_path, chat_template=named)
    assert rendered(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert rendered(tmp_path) == "three"
    (tmp_path / "other.jinja").write_text("four")
    assert rendered(tmp_path, tmp_path / "other.jinja") == "four"


def rendered(folder: Path, override: Path | None = None) -> str:
    template = ChatTemplate.from_folder(folder, override)
    assert template is not None
    return template.render([])


def test_a_broken_template_is_a_sentence_with_its_line(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=re.escape("not valid Jinja") + r".*\(line 2\)"):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate.from_folder(tmp_path, tmp_path / "absent.jinja")
