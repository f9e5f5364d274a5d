"""What `tetrad bench serve` sends: datasets, lengths, and the fields of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from tetrad.bench.options.target import ServerOptions
from tetrad.core.option import option

DatasetName = Literal[
    "random-ids",
    "random",
    "sharegpt",
    "custom",
    "openai",
    "generated-shared-prefix",
    "mooncake",
]
FILE_DATASETS = ("sharegpt", "custom", "openai", "mooncake")
"""Datasets that are nothing without a file."""


class WorkloadOptions(ServerOptions):
    """Datasets, lengths and what every request asks for."""

    dataset_name: DatasetName = option(
        "random-ids",
        "random-ids: random token ids, exact lengths; random: random text whose length is exact by "
        "the tokenizer; generated-shared-prefix: groups of prompts with one beginning; sharegpt, "
        "custom, openai and mooncake read --dataset-path.",
        group="Workload",
    )
    dataset_path: Path | None = option(
        None,
        "File of the dataset. custom: JSONL, each line with prompt, messages, turns or input_ids, "
        "and perhaps output_len; openai: JSONL of chat requests; sharegpt: JSON or JSONL of "
        "conversations; mooncake: JSONL with timestamp, input_length, output_length and hash_ids; "
        "random: conversations whose text is repeated or cut to length.",
        group="Workload",
    )
    dataset_offset: int = option(
        0, "Leave out so many entries at the beginning of the file.", group="Workload", ge=0
    )
    num_prompts: int | None = option(
        None,
        "Number of requests. Default: 1000, or every line of a file, or as many as "
        "--rate-profile covers; generated-shared-prefix has as many as its groups; in a sweep of "
        "--concurrency the random datasets have what --requests-per-slot says.",
        group="Workload",
        ge=1,
    )
    random_input_len: int = option(
        1024,
        "Longest prompt of the random datasets, in tokens; with --length-distribution normal or "
        "lognormal the mean.",
        group="Workload",
        ge=1,
    )
    random_output_len: int = option(
        1024,
        "Longest output of the random datasets, in tokens; also of file lines that name none.",
        group="Workload",
        ge=1,
    )
    random_range_ratio: float = option(
        0.0,
        "Lengths are drawn evenly from [length * ratio, length]; 1 makes all of them the longest. "
        "The default 0 therefore halves them on average.",
        group="Workload",
        ge=0.0,
        le=1.0,
    )
    length_distribution: Literal["uniform", "normal", "lognormal"] = option(
        "uniform",
        "How lengths of the random datasets are drawn: uniform is --random-range-ratio's; the "
        "others have the given lengths as their mean.",
        group="Workload",
    )
    length_cv: float = option(
        0.5,
        "Standard deviation over the mean, of normal and lognormal lengths.",
        group="Workload",
        ge=0.0,
        le=10.0,
    )
    sharegpt_output_len: int | None = option(
        None,
        "Output length of every line of sharegpt, custom and openai. Default: the length of the "
        "answer in the file, or what the line names.",
        group="Workload",
        ge=1,
    )
    sharegpt_context_len: int | None = option(
        None,
        "Leave out conversations of sharegpt and custom with more prompt and output tokens.",
        group="Workload",
        ge=2,
    )
    prompt_suffix: str = option("", "Put after every prompt of a file.", group="Workload")
    apply_chat_template: bool = option(
        False,
        "Put prompts of a file through the chat template of the tokenizer's folder.",
        group="Workload",
    )
    tokenize_prompt: bool = option(
        False,
        "Send token ids in place of text, so that lengths are exact; random-ids always does.",
        group="Workload",
    )
    cache_bust: bool = option(
        False,
        "Begin every prompt of a file differently in every run, so that no earlier run has filled "
        "the server's prefix cache; generated prompts are fresh anyway.",
        group="Workload",
    )
    gsp_num_groups: int = option(
        64, "Groups of generated-shared-prefix.", group="Shared prefix", ge=1
    )
    gsp_prompts_per_group: int = option(
        16, "Prompts, or conversations, of a group.", group="Shared prefix", ge=1
    )
    gsp_system_prompt_len: int = option(
        2048, "Tokens that a group's prompts have in common.", group="Shared prefix", ge=1
    )
    gsp_question_len: int = option(
        128, "Tokens of a question after them.", group="Shared prefix", ge=1
    )
    gsp_output_len: int = option(256, "Output tokens.", group="Shared prefix", ge=1)
    gsp_range_ratio: float = option(
        1.0,
        "The three lengths are drawn evenly from [length * ratio, length].",
        group="Shared prefix",
        ge=0.0,
        le=1.0,
    )
    gsp_num_turns: int = option(
        1,
        "Questions of a conversation; each is sent when the one before is answered, with answers "
        "drawn beforehand as its history.",
        group="Shared prefix",
        ge=1,
    )
    gsp_ordered: bool = option(
        False, "Send group after group; else in random order.", group="Shared prefix"
    )
    gsp_group_distribution: Literal["uniform", "zipf"] = option(
        "uniform",
        "zipf: each conversation's group is drawn with probability 1 / rank ** alpha.",
        group="Shared prefix",
    )
    gsp_zipf_alpha: float | None = option(None, "Alpha of zipf.", group="Shared prefix", gt=0.0)

    mooncake_slowdown_factor: float = option(
        1.0, "Stretch a trace's time stamps by this factor.", group="Trace", gt=0.0
    )
    mooncake_num_rounds: int = option(
        1,
        "Rounds of each entry: as many turns of one conversation with the entry's lengths.",
        group="Trace",
        ge=1,
    )
    use_trace_timestamps: bool = option(
        False,
        "Send a trace's requests at its time stamps; --request-rate is not used then.",
        group="Trace",
    )

    seed: int | None = option(
        None,
        "Seed of lengths, arrivals and content. Default: 42 for lengths and arrivals, fresh "
        "content for every run, so that no earlier run has filled the server's prefix cache.",
        group="Workload",
        ge=0,
        le=2**63 - 1,
    )
    disable_ignore_eos: bool = option(
        False, "Let the model stop early; else it must give the full length.", group="Request"
    )
    disable_stream: bool = option(
        False, "Ask for whole answers; only end-to-end latency can be measured.", group="Request"
    )
    temperature: float = option(0.0, "Sampling temperature.", group="Request", ge=0.0)
    top_p: float = option(1.0, "Nucleus sampling.", group="Request", gt=0.0, le=1.0)
    return_logprob: bool = option(
        False, "Ask for log-probabilities, which the answer then carries.", group="Request"
    )
    top_logprobs_num: int = option(
        0, "So many most likely tokens at each place, with --return-logprob.", group="Request", ge=0
    )
    token_ids_logprob: tuple[int, ...] = option(
        (),
        "Tokens whose log-probability is wanted at each place (/generate only).",
        group="Request",
    )
    logprob_start_len: int = option(
        -1,
        "First place of the prompt with log-probabilities; -1 for the output's only (/generate "
        "only).",
        group="Request",
        ge=-1,
    )
    return_routed_experts: bool = option(
        False, "Ask which experts each token went to (/generate only).", group="Request"
    )
    extra_request_body: str | None = option(
        None, "JSON object merged into every request's body.", group="Request"
    )

    @field_validator("extra_request_body")
    @classmethod
    def _is_an_object(cls, text: str | None) -> str | None:
        if text is not None and not isinstance(_parsed(text), dict):
            raise ValueError("the extra body must be a JSON object such as '{\"top_p\": 0.9}'")
        return text

    @model_validator(mode="after")
    def _has_its_file(self) -> WorkloadOptions:
        name, path = self.dataset_name, self.dataset_path
        if name in FILE_DATASETS and path is None:
            raise ValueError(
                f"the {name} dataset needs --dataset-path FILE; nothing is downloaded, and "
                "--dataset-name random needs no file"
            )
        if name not in (*FILE_DATASETS, "random") and path is not None:
            raise ValueError(f"the {name} dataset reads no file; use --dataset-name custom for one")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> WorkloadOptions:
        if (self.gsp_group_distribution == "zipf") != (self.gsp_zipf_alpha is not None):
            raise ValueError("--gsp-group-distribution zipf and --gsp-zipf-alpha go together")
        if self.length_distribution != "uniform" and self.random_range_ratio:
            raise ValueError(
                f"--random-range-ratio belongs to uniform lengths, and {self.length_distribution} "
                "ones have --length-cv"
            )
        if self.use_trace_timestamps and self.dataset_name != "mooncake":
            raise ValueError("--use-trace-timestamps needs --dataset-name mooncake")
        if self.apply_chat_template and self.backend.endswith("-chat"):
            raise ValueError(
                "with a -chat backend the server applies its template; leave "
                "--apply-chat-template out"
            )
        return self

    @model_validator(mode="after")
    def _is_native(self) -> WorkloadOptions:
        native = self.backend in ("tetrad", "sglang", "sglang-native")
        for flag, is_set in (
            ("--token-ids-logprob", bool(self.token_ids_logprob)),
            ("--logprob-start-len", self.logprob_start_len != -1),
            ("--return-routed-experts", self.return_routed_experts),
        ):
            if is_set and not native:
                raise ValueError(f"{flag} is a field of /generate; use --backend sglang")
        return self

    @property
    def extra_body(self) -> dict[str, Any]:
        """`extra_request_body`, parsed."""
        return dict(json.loads(self.extra_request_body or "{}"))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the extra body is not valid JSON: {error}") from error
