"""What the smaller verbs were asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from tetrad.bench.eval.problems import KINDS
from tetrad.core.errors import nearest
from tetrad.core.option import CLIENT_KEY, Config, option


class ServerChoice(Config):
    """Which server to speak to: a running one, or one that is started for the occasion."""

    url: str | None = option(
        None,
        "Address of a running server. Default: the Tetrad server at 127.0.0.1:30000; if nothing "
        "listens there, one is started and stopped again.",
        aliases=("--base-url",),
    )
    model: Path | None = option(
        None, "Start a server with this model folder. Default: the embedded model."
    )
    api_key: str | None = option(None, "Sent as a bearer token.", env=CLIENT_KEY)

    @model_validator(mode="after")
    def _one_of_them(self) -> ServerChoice:
        if self.url is not None and self.model is not None:
            raise ValueError("--model starts a server and --url uses one; give one of them")
        return self


class ChatConfig(ServerChoice):
    """Options of `tetrad chat`."""

    prompt: str | None = option(
        None,
        "What to ask. Default: standard input, or a conversation if that is a terminal.",
        group="Question",
    )
    system: str | None = option(None, "System message.", group="Question")
    no_think: bool = option(False, "Answer without reasoning first.", group="Question")
    max_tokens: int | None = option(
        None,
        "Maximum answer length, reasoning included. Default: the server's.",
        group="Question",
        ge=1,
    )
    temperature: float | None = option(
        None, "Sampling temperature. Default: the model's.", group="Question", ge=0.0, le=2.0
    )


class EvalConfig(ServerChoice):
    """Options of `tetrad eval`."""

    num_problems: int = option(
        20, "Number of problems per kind.", group="Problems", ge=1, le=100_000
    )
    kinds: tuple[str, ...] = option(
        (), f"Kinds of problem. Default: all of {', '.join(KINDS)}.", group="Problems"
    )
    seed: int = option(0, "Seed of the problems.", group="Problems", ge=0, le=2**63 - 1)
    max_concurrency: int = option(16, "Maximum requests in flight.", group="Problems", ge=1)
    max_tokens: int = option(
        512, "Maximum answer length, reasoning included.", group="Problems", ge=1, le=1_000_000
    )
    min_accuracy: float = option(
        0.0,
        "Exit with an error if accuracy is below this.",
        group="Result",
        ge=0.0,
        le=1.0,
    )
    json_: bool = option(False, "Print one JSON document instead of a table.", group="Result")

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                cure = nearest(kind, KINDS) or f" There are {', '.join(KINDS)}."
                raise ValueError(f"there is no kind {kind!r}.{cure}")
        return kinds or KINDS


class DoctorConfig(Config):
    """Options of `tetrad doctor`."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device to examine; auto uses the GPU if there is one.", group="Device"
    )
    json_: bool = option(False, "Print one JSON document instead of tables.", group="Result")
