"""Flags are generated from configuration models, never written beside them.

A verb is declared with the model of its options; every field becomes one flag with the field's
description, default, range, aliases and help group.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from cyclopts import Group, Parameter
from pydantic.fields import FieldInfo

from tetrad.core.option import Config

C = TypeVar("C", bound=Config)

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
KEYWORD_OR_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD
BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
OBVIOUS = 10**12
"""Limits beyond this only say how an integer is stored; help leaves them out."""


def verb(
    config: type[C], run: Callable[[C], int], *, positional: tuple[str, ...] = ()
) -> Callable[..., int]:
    """A command whose parameters are the fields of `config`; `run` gets the parsed configuration.

    `positional` names fields that may also be given without their flag. A value that the model
    refuses is a ConfigError of one sentence.
    """
    signature = inspect.Signature(list(_parameters(config, positional)), return_annotation=int)

    def command(*args: Any, **values: Any) -> int:
        return run(config.parse(signature.bind(*args, **values).arguments))

    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    command.__dict__["__signature__"] = signature
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return command


def _parameters(config: type[Config], positional: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    names = dict.fromkeys(_extra(field)["group"] for field in config.model_fields.values())
    groups = {name: Group(name, sort_key=place) for place, name in enumerate(names)}
    fields = config.model_fields
    for name in sorted(fields, key=lambda name: name not in positional):
        yield inspect.Parameter(
            name,
            KEYWORD_OR_PLACE if name in positional else KEYWORD_ONLY,
            default=inspect.Parameter.empty if fields[name].is_required() else fields[name].default,
            annotation=Annotated[
                fields[name].annotation,
                _flag(name, fields[name], groups[_extra(fields[name])["group"]]),
            ],
        )


def _flag(name: str, field: FieldInfo, group: Group) -> Parameter:
    extra = _extra(field)
    return Parameter(
        name=["--" + name.rstrip("_").replace("_", "-"), *extra["aliases"]],
        help=f"{field.description}{_range(field)}",
        group=group,
        negative="",
        env_var=extra.get("env"),
        show_default=_shown if _has_default(field) else False,
        consume_multiple=True if typing.get_origin(field.annotation) is tuple else None,
    )


def _has_default(field: FieldInfo) -> bool:
    """Whether the flag stands for a value when it is left out."""
    return not (
        field.is_required()
        or field.default is None
        or field.default is False
        or field.default in ((), "")
    )


def _shown(default: Any) -> str:
    """As it would be typed."""
    return " ".join(default) if isinstance(default, tuple) else str(default)


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "every field is declared with option()"
    return typing.cast("dict[str, Any]", extra)


def _range(field: FieldInfo) -> str:
    """The limits of a number for its help line: " [at least 0, at most 1]"."""
    limits = []
    for bound in field.metadata:
        attribute, words = BOUNDS.get(type(bound), ("", ""))
        if attribute and abs(limit := getattr(bound, attribute)) < OBVIOUS:
            limits.append(f"{words} {limit:,}")
    return f" [{', '.join(limits)}]" if limits else ""
