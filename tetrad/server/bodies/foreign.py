"""Fields of OpenAI's, SGLang's and vLLM's bodies that have no use here, each with the reason.

Two kinds: `Accepted` fields change nothing, so they may have any value; `Refused` ones would change
the answer, so they may only be there switched off. docs/api.md lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from tetrad.server.bodies.read import Accepted, Body


@dataclass(frozen=True)
class Refused:
    """Marks a field that may be absent, switched off (null, false, 0, empty) or one of `allowed`;
    anything else is refused by `reason`, which says what would work."""

    reason: str
    allowed: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: Any) -> dict[str, Any]:
        # What is let through is no schema: generators of clients drop a body with an enum of
        # several types.
        but = "".join(f", {value!r}" for value in self.allowed)
        return {"deprecated": True, "description": f"Off{but} or refused: {self.reason}."}

    def _check(self, value: Any) -> Any:
        if value and value not in self.allowed:
            raise ValueError(self.reason)
        return value


LATER = "is not supported yet; leave this field out"
ONE_WEIGHT = "this server has the weights of its model alone; leave this field out"
NOT_TEXT = "this model reads text; leave this field out"
ONE_PROCESS = "this server computes prompts and answers in one process; leave this field out"
NO_CODE = "no code of a request is run; leave this field out"
ONE_CACHE = (
    "the prefix cache is one for all requests; leave this field out, or start the server with "
    "--disable-radix-cache"
)
SESSIONS = (
    "there are no sessions; send the whole prompt, of which known pages are not computed anew"
)


class ForeignSampling(Body):
    """Of every route that generates."""

    spaces_between_special_tokens: Accepted = None
    length_penalty: Accepted = None
    early_stopping: Accepted = None
    stream_interval: Accepted = None
    truncation_side: Accepted = None
    custom_labels: Accepted = None
    use_beam_search: Annotated[Any, Refused("there is no beam search; use n or best_of")] = None
    stop_regex: Annotated[Any, Refused(LATER)] = None
    logits_processors: Annotated[Any, Refused(NO_CODE)] = None
    custom_logit_processor: Annotated[Any, Refused(NO_CODE)] = None
    custom_params: Annotated[Any, Refused(NO_CODE)] = None
    watermarking: Annotated[Any, Refused("no text is marked; leave this field out")] = None
    logprob_token_ids: Annotated[Any, Refused("is not supported; use top_logprobs")] = None
    thinking_token_budget: Annotated[
        Any, Refused("is not supported; use max_tokens, or -1", (-1,))
    ] = None
    thinking_budget: Annotated[Any, Refused("is not supported; use max_tokens, or -1", (-1,))] = (
        None
    )
    truncate_prompt_tokens: Annotated[
        Any, Refused("a prompt is never cut; /tokenize tells how long one is")
    ] = None
    repetition_detection: Annotated[Any, Refused("is not supported; use repetition_penalty")] = None
    prompt_logprobs: Annotated[
        Any, Refused("log-probabilities of the prompt are not supported")
    ] = None


class ForeignRouting(Body):
    """What other servers read about where and by whom a request is served."""

    data_parallel_rank: Accepted = None
    routed_dp_rank: Accepted = None
    routing_key: Accepted = None
    session_id: Accepted = None
    return_cached_tokens_details: Accepted = None
    routed_experts_start_len: Accepted = None
    routed_experts_prompt_start: Accepted = None
    lora_path: Annotated[Any, Refused(ONE_WEIGHT)] = None
    extra_key: Annotated[Any, Refused(ONE_CACHE)] = None
    cache_salt: Annotated[Any, Refused(ONE_CACHE)] = None
    session_params: Annotated[Any, Refused(SESSIONS)] = None
    bootstrap_host: Annotated[Any, Refused(ONE_PROCESS)] = None
    bootstrap_port: Annotated[Any, Refused(ONE_PROCESS)] = None
    bootstrap_room: Annotated[Any, Refused(ONE_PROCESS)] = None
    disagg_prefill_dp_rank: Annotated[Any, Refused(ONE_PROCESS)] = None
    ec_transfer_params: Annotated[Any, Refused(ONE_PROCESS)] = None
    kv_transfer_params: Annotated[Any, Refused(ONE_PROCESS)] = None
    return_hidden_states: Annotated[Any, Refused(LATER)] = None
    return_routed_experts: Annotated[Any, Refused(LATER)] = None


class ForeignOpenAI(ForeignRouting):
    """Of chat and completions."""

    user: Accepted = None
    metadata: Accepted = None
    store: Accepted = None
    service_tier: Accepted = None
    safety_identifier: Accepted = None
    prompt_cache_key: Accepted = None
    prompt_cache_retention: Accepted = None
    max_dynamic_patch: Accepted = None
    min_dynamic_patch: Accepted = None
    images_config: Accepted = None
    return_token_offsets: Accepted = None
    return_mm_kwargs: Accepted = None
    ngram_corpus_id: Annotated[Any, Refused(LATER)] = None
    return_prompt_text: Annotated[Any, Refused("is not supported; use /tokenize")] = None
    return_meta_info: Annotated[Any, Refused("is not supported; /generate gives it")] = None
    return_prompt_token_ids: Annotated[Any, Refused("is not supported; use /tokenize")] = None
    vllm_xargs: Annotated[Any, Refused(NO_CODE)] = None
    return_token_ids: Annotated[Any, Refused("is not supported; /generate gives output_ids")] = None
    return_tokens_as_token_ids: Annotated[
        Any, Refused("is not supported; /generate gives output_ids")
    ] = None


class ForeignChat(Body):
    """Of chat alone."""

    prediction: Accepted = None
    verbosity: Accepted = None
    stream_reasoning: Accepted = None
    media_io_kwargs: Accepted = None
    use_audio_in_video: Accepted = None
    task: Accepted = None
    input_ids: Annotated[Any, Refused("use /v1/completions with token ids as prompt")] = None
    mm_processor_kwargs: Accepted = None
    modalities: Annotated[Any, Refused('this model writes text; ["text"] works', (["text"],))] = (
        None
    )
    audio: Annotated[Any, Refused("this model writes text; leave this field out")] = None
    web_search_options: Annotated[
        Any, Refused("this server searches nothing; leave this field out")
    ] = None
    documents: Annotated[Any, Refused("put documents into a message")] = None
    chat_template: Annotated[Any, Refused("start the server with --chat-template")] = None
    add_special_tokens: Annotated[
        Any, Refused("the chat template writes them itself; false works")
    ] = None
    echo: Annotated[Any, Refused("is not supported for chat; use continue_final_message")] = None


class ForeignGenerate(ForeignRouting):
    """Of /generate."""

    log_metrics: Accepted = None
    no_logs: Accepted = None
    modalities: Accepted = None
    conversation_id: Accepted = None
    routing_id: Accepted = None
    received_time: Accepted = None
    image_data: Annotated[Any, Refused(NOT_TEXT)] = None
    video_data: Annotated[Any, Refused(NOT_TEXT)] = None
    audio_data: Annotated[Any, Refused(NOT_TEXT)] = None
    input_embeds: Annotated[Any, Refused("embeddings cannot be read; use text or input_ids")] = None
    token_ids_logprob: Annotated[Any, Refused("is not supported; use top_logprobs_num")] = None
    return_text_in_logprobs: Annotated[
        Any, Refused("is not supported; /detokenize gives texts of ids")
    ] = None
    custom_logit_processor: Annotated[Any, Refused(NO_CODE)] = None
    background: Annotated[Any, Refused("is not supported; /v1/responses has background")] = None
    require_reasoning: Annotated[
        Any, Refused("is not supported; /v1/chat/completions has reasoning")
    ] = None
    return_entropy: Annotated[Any, Refused(LATER)] = None
    return_bytes: Annotated[Any, Refused(LATER)] = None
