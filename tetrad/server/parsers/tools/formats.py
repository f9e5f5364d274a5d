"""The formats of tool calls that are known, by SGLang's names."""

from __future__ import annotations

from tetrad.server.parsers.tools.dsml import DsmlParser
from tetrad.server.parsers.tools.events import ToolParser
from tetrad.server.parsers.tools.glm import KEY_OPEN, GlmParser
from tetrad.server.parsers.tools.json import JsonParser

TOOL_FORMATS: dict[str, type[ToolParser]] = {
    "glm45": GlmParser,
    "glm47": GlmParser,
    "deepseekv32": DsmlParser,
    "qwen": JsonParser,
    "hermes": JsonParser,
}


def guessed_format(template: str) -> str | None:
    """By what a chat template writes; None if it writes no calls that are known."""
    if "DSML" in template:
        return "deepseekv32"
    if GlmParser.open not in template:
        return None
    if KEY_OPEN not in template:
        return "hermes"
    return "glm45" if f"\\n{KEY_OPEN}" in template else "glm47"
