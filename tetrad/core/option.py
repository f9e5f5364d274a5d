"""How options are declared: one field is one description, one range and one flag.

The command line and its help are generated from these models, never written beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.config import JsonDict

from tetrad.core.errors import ConfigError, nearest


class Config(BaseModel):
    """A frozen model whose unknown keys are errors that name the nearest known one.

    A number must be finite, unless its field says `allow_inf_nan`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Build from flag values; a mistake is a ConfigError of one sentence."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(error, cls)) from None


def _sentence(error: ValidationError, cls: type[BaseModel]) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    end = "" if message.endswith((".", "?")) else "."
    if not first["loc"]:
        return f"{message[0].upper()}{message[1:]}{end}"
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"Unknown option {name!r}.{nearest(name, cls.model_fields)}"
    flag = "--" + name.replace("_", "-")
    value = first["input"]
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{flag} {shown}: {message[0].lower()}{message[1:]}{end}"


CLIENT_KEY = ("TETRAD_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key of a server to speak to."""
KEY_PLACES = f"--api-key or in {' or '.join(CLIENT_KEY)}"
"""For sentences that ask for the key."""


def option(
    default: Any,
    description: str,
    *,
    aliases: tuple[str, ...] = (),
    group: str = "Server",
    env: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """Declare one field: description, range (`ge`, `le`, `gt`), extra flag names, help group.

    `env` names the environment variables of which the command line reads the first that is there
    when the flag is absent. They say that the value is a secret, which is never shown.
    """
    extra: JsonDict = {"aliases": list(aliases), "group": group, "env": list(env)}
    limits.setdefault("repr", not env)
    return Field(default, description=description, json_schema_extra=extra, **limits)


def checked(*names: str, by: Callable[[str], str]) -> Any:
    """A validator of fields that hold a text or None: `by` returns the text as the field will hold
    it, or raises ValueError."""
    return field_validator(*names)(lambda text: None if text is None else by(text))


def secrets(config: type[Config]) -> set[str]:
    """Names of the fields whose values are never shown."""
    return {
        name
        for name, field in config.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["env"]
    }


def in_vain(config: Config, fields: Iterable[str], why: str) -> Iterator[str]:
    """One sentence about those of the fields that are not what they are by default."""
    flags = [
        "--" + field.replace("_", "-")
        for field in fields
        if getattr(config, field) != type(config).model_fields[field].default
    ]
    if flags:
        yield f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect {why}."
