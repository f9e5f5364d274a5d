"""Everything about a run that is fixed before the first request leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tetrad.bench.load import target
from tetrad.bench.load.backends import Body, ignores_eos, most_tokens, protocol, write_body
from tetrad.bench.load.client import Client
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.serve.watch import Watch
from tetrad.bench.workload.arrivals import due_times, in_words
from tetrad.bench.workload.datasets import FILES, build
from tetrad.bench.workload.files import lines_of
from tetrad.bench.workload.requests import Prompt, Seeds
from tetrad.bench.workload.tokens import Vocabulary, has_tokenizer
from tetrad.core.errors import BenchFailure, CheckpointError, ConfigError
from tetrad.core.spread import Spread


@dataclass(slots=True)
class Plan:
    """A workload drawn and written down."""

    config: BenchServeConfig
    seeds: Seeds
    model: str | None
    vocabulary: Vocabulary | None
    prompts: list[Prompt]
    bodies: list[Body]
    due_s: list[float]
    """When each is due; for one that waits for another's end, how long after that."""

    @property
    def ignore_eos(self) -> bool:
        """Whether the server is told to go on past end tokens."""
        return ignores_eos(self.bodies[0])

    def most_tokens(self, index: int) -> int:
        """What the answer to a body may have; `--extra-request-body` may have changed it."""
        return most_tokens(self.bodies[index]) or self.prompts[index].output_tokens


async def prepare(
    config: BenchServeConfig,
    client: Client,
    watch: Watch,
    repetition: int = 0,
    setting: str = "",
) -> Plan:
    """Read the file, look at the server, draw the prompts, write the bodies; others for each
    `repetition` of each `setting` of a sweep.

    Raises BenchFailure when no server answers, ConfigError when the workload cannot be sent.
    """
    if config.dataset_path is not None:
        lines_of(config.dataset_path)
    found = await target.find(client, config.ready_check_timeout_sec, watch.say)
    model = config.model or found.model
    if model is None and protocol(config.backend).path != "/generate":
        raise ConfigError(f"{config.url}/v1/models names no model; give --model.")
    vocabulary = _vocabulary(config, found.tokenizer, watch.say_once)
    if found.silence and vocabulary is None and config.dataset_name not in FILES:
        raise BenchFailure(found.silence)
    seeds = Seeds.of(config).of_run(repetition, setting)
    prompts = build(config, seeds, vocabulary)
    bodies = [write_body(config, model, prompt) for prompt in prompts]
    say = watch.say_once
    say(f"{config.backend} at {config.url}, model {model or 'not named'}")
    say(f"prompt lengths: {lengths([p.num_tokens for p in prompts])}")
    say(f"output lengths: {lengths([p.output_tokens for p in prompts])}")
    due_s = due_times(config, prompts, seeds.shape)
    say(f"arrivals: {in_words(config)}; the last of {len(due_s)} is due at {max(due_s):.2f} s")
    return Plan(config, seeds, model, vocabulary, prompts, bodies, due_s)


def _vocabulary(
    config: BenchServeConfig, named: Path | None, say: Callable[[str], None]
) -> Vocabulary | None:
    """By --tokenizer, the server's word or --model; a GGUF file of the server's that is not read
    here is said and passed over, since not every workload needs it."""
    if config.tokenizer is not None:
        return Vocabulary(config.tokenizer)
    folder = named or model_folder(config.model)
    try:
        return None if folder is None else Vocabulary(folder)
    except CheckpointError as error:
        say(f"the server's tokenizer is not used: {error}")
        return None


def model_folder(model: str | None) -> Path | None:
    """The folder or GGUF file with the tokenizer, when `--model` is the path of one, as SGLang's
    command lines have it."""
    folder = Path(model or "")
    return folder if model and has_tokenizer(folder) else None


def lengths(values: Sequence[int | None]) -> str:
    """The distribution that really runs, in words."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown to the client"
    spread = Spread.of(known)
    return (
        f"{len(known)} requests, {sum(known)} tokens, mean {spread.mean:.1f}, "
        f"min {spread.min:.0f}, median {spread.median:.0f}, max {spread.max:.0f}"
    )
