"""The shapes of a model, read from its config.json. `config.json` is data: nothing is executed.

Axis letters used in shapes all over the project:

    T tokens of a step      S sequences of a step     H attention heads
    D hidden size           V vocabulary              E routed experts
    K experts per token     F expert intermediate     Q query latent (q_lora_rank)
    C key latent (kv_lora_rank)   N nope width per head   R rope width   O value width per head
    X indexer heads         I indexer head width      P pages            L layers
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tetrad.core.errors import CheckpointError, ConfigError, nearest
from tetrad.core.jsonfile import read_json_object

LATENT_TYPES = ("glm_moe_dsa", "deepseek_v32")
"""Values of `model_type` that a `ModelArch` describes."""
MODEL_TYPES = (*LATENT_TYPES, "llama")
"""All that is served."""


@dataclass(frozen=True, slots=True)
class RopeArch:
    """Rotary embedding. `yarn` is None or the yarn parameters of the config."""

    theta: float
    dim: int
    """Rotated width R (even)."""
    max_position: int
    yarn: YarnArch | None = None
    llama3: Llama3Arch | None = None


@dataclass(frozen=True, slots=True)
class YarnArch:
    """Yarn scaling as DeepSeek uses it; `attention_scale` multiplies the softmax scale."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def attention_scale(self) -> float:
        """mscale(factor, mscale_all_dim) squared; 1.0 when mscale_all_dim is 0."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    @property
    def rotation_scale(self) -> float:
        """Multiplies cos and sin."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


@dataclass(frozen=True, slots=True)
class Llama3Arch:
    """Scaling of Llama 3.1: slow pairs turn `factor` times slower, fast ones as ever."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 for factor > 1, else 1 (YaRN, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class MlaArch:
    """Multi-head latent attention."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    """(nope_dim + rope_dim) ** -0.5, times yarn's attention_scale."""

    @property
    def latent_dim(self) -> int:
        """Width of one cached token: latent and rotary key together."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class IndexerArch:
    """The sparse indexer: which keys a query attends to."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    """True: pairs (2i, 2i+1) as GLM; False: half-split as DeepSeek-V3.2."""
    full_layers: tuple[int, ...]
    """Layers that own an indexer; the others reuse the choice of the last one before them."""


@dataclass(frozen=True, slots=True)
class MoeArch:
    """Routed and shared experts."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    """Columns of all shared experts together."""
    num_groups: int
    groups_per_token: int
    normalise_weights: bool
    scaling: float
    first_dense_layers: int


@dataclass(frozen=True, slots=True)
class ModelArch:
    """Everything about a model's shape that the house needs."""

    model_type: str
    num_layers: int
    num_mtp_layers: int
    hidden: int
    vocab: int
    dense_intermediate: int
    norm_eps: float
    max_position: int
    rope: RopeArch
    mla: MlaArch
    indexer: IndexerArch
    moe: MoeArch
    eos_ids: tuple[int, ...]
    first_layer: int = 0
    """Of a pipeline's stage: the number that the whole model gives its first layer. Everything here
    counts layers from 0."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelArch:
        """Read `folder`/config.json. Raises CheckpointError with a sentence."""
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} holds no config.json, so it is not a model folder.")
        return cls.from_config(read_json_object(path))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelArch:
        """Build from a parsed config.json of a supported `model_type`."""
        model_type = config.get("model_type")
        if model_type not in LATENT_TYPES:
            raise CheckpointError(
                f"model_type {model_type!r} is not supported here; "
                f"{' and '.join(LATENT_TYPES)} are.{nearest(str(model_type), LATENT_TYPES)}"
            )
        read = Reader(config)
        num_layers = read.integer("num_hidden_layers")
        rope = _rope(read)
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            num_mtp_layers=read.integer("num_nextn_predict_layers", 0),
            hidden=read.integer("hidden_size"),
            vocab=read.integer("vocab_size"),
            dense_intermediate=read.integer("intermediate_size"),
            norm_eps=read.number("rms_norm_eps"),
            max_position=read.integer("max_position_embeddings"),
            rope=rope,
            mla=_mla(read, rope),
            indexer=_indexer(read, model_type, num_layers),
            moe=_moe(read, num_layers),
            eos_ids=eos_ids(read),
        )

    def first_layers(self, num_layers: int | None) -> ModelArch:
        """The same model with its first `num_layers` only; None, or more than it has: all. Raises
        ConfigError where no layer with experts would be left."""
        if num_layers is None or num_layers >= self.num_layers:
            return self
        if num_layers <= self.moe.first_dense_layers:
            raise ConfigError(
                f"--num-layers {num_layers}: the first {self.moe.first_dense_layers} layers of the "
                f"model are dense; {self.moe.first_dense_layers + 1} is the fewest with experts."
            )
        full = tuple(layer for layer in self.indexer.full_layers if layer < num_layers)
        indexer = replace(self.indexer, full_layers=full)
        return replace(self, num_layers=num_layers, indexer=indexer)


class Reader:
    """Typed look-ups whose errors name the key, what was expected and what was found."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"config.json: {key} must be a whole number, found {value!r}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise CheckpointError(f"config.json: {key} must be a number, found {value!r}.")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"config.json lacks {key}, which {self.config.get('model_type')} needs."
            )
        return value


def _rope(read: Reader) -> RopeArch:
    params = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    theta = params.get("rope_theta", read.config.get("rope_theta"))
    if theta is None:
        raise CheckpointError("config.json lacks rope_parameters.rope_theta; it is never guessed.")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise CheckpointError(f"rope type {kind!r} is not supported; 'default' and 'yarn' are.")
    return RopeArch(
        theta=float(theta),
        dim=read.integer("qk_rope_head_dim"),
        max_position=read.integer("max_position_embeddings"),
        yarn=_yarn(params, read) if kind == "yarn" else None,
    )


def _yarn(params: dict[str, Any], read: Reader) -> YarnArch:
    factor = float(params["factor"])
    original = params.get("original_max_position_embeddings")
    return YarnArch(
        factor=factor,
        original_max_position=int(original or read.integer("max_position_embeddings") / factor),
        beta_fast=float(params.get("beta_fast", 32.0)),
        beta_slow=float(params.get("beta_slow", 1.0)),
        mscale=float(params.get("mscale", 1.0)),
        mscale_all_dim=float(params.get("mscale_all_dim", 0.0)),
    )


def _mla(read: Reader, rope: RopeArch) -> MlaArch:
    nope_dim = read.integer("qk_nope_head_dim")
    scale = (nope_dim + rope.dim) ** -0.5
    return MlaArch(
        num_heads=read.integer("num_attention_heads"),
        q_lora_rank=read.integer("q_lora_rank"),
        kv_lora_rank=read.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        v_dim=read.integer("v_head_dim"),
        softmax_scale=scale * (rope.yarn.attention_scale if rope.yarn else 1.0),
    )


def _indexer(read: Reader, model_type: str, num_layers: int) -> IndexerArch:
    config = read.config
    interleaved = config.get("indexer_rope_interleave")
    return IndexerArch(
        num_heads=read.integer("index_n_heads"),
        head_dim=read.integer("index_head_dim"),
        topk=read.integer("index_topk"),
        rope_interleaved=model_type == "glm_moe_dsa" if interleaved is None else bool(interleaved),
        full_layers=full_indexer_layers(config, num_layers),
    )


def full_indexer_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Which layers own an indexer: `indexer_types`, else `index_topk_pattern`, else freq/offset.

    The rule for the last is: full iff max(i - offset + 1, 0) % freq == 0.
    """
    kinds: list[bool]
    if types := config.get("indexer_types"):
        kinds = [kind == "full" for kind in types]
    elif pattern := config.get("index_topk_pattern"):
        kinds = [letter == "F" for letter in pattern]
    else:
        freq = int(config.get("index_topk_freq") or 1)
        offset = int(config.get("index_skip_topk_offset") or 2)
        kinds = [max(i - offset + 1, 0) % freq == 0 for i in range(num_layers)]
    if len(kinds) < num_layers or not kinds[0]:
        raise CheckpointError(
            f"the indexer schedule covers {len(kinds)} of {num_layers} layers and its first entry "
            f"must be a full indexer; a truncated schedule would silently degrade the output."
        )
    return tuple(i for i, full in enumerate(kinds[:num_layers]) if full)


def _moe(read: Reader, num_layers: int) -> MoeArch:
    experts_key = "n_routed_experts" if "n_routed_experts" in read.config else "num_experts"
    if (scoring := read.config.get("scoring_func", "sigmoid")) != "sigmoid":
        raise CheckpointError(f"scoring_func {scoring!r} is not supported; 'sigmoid' is.")
    if (activation := read.config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; 'silu' is.")
    num_experts, num_groups = read.integer(experts_key), read.integer("n_group", 1)
    if num_groups > 1 and (num_experts % num_groups or num_experts < 2 * num_groups):
        raise CheckpointError(
            f"config.json: {num_experts} experts do not form {num_groups} equal groups of two."
        )
    intermediate = read.integer("moe_intermediate_size")
    return MoeArch(
        num_experts=num_experts,
        experts_per_token=read.integer("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=intermediate * read.integer("n_shared_experts", 1),
        num_groups=num_groups,
        groups_per_token=read.integer("topk_group", 1),
        normalise_weights=bool(read.config.get("norm_topk_prob", True)),
        scaling=read.number("routed_scaling_factor", 1.0),
        first_dense_layers=_first_dense_layers(read, num_layers),
    )


def _first_dense_layers(read: Reader, num_layers: int) -> int:
    """From `mlp_layer_types` (it wins, as in Hugging Face's models) or first_k_dense_replace."""
    kinds: list[str] | None = read.config.get("mlp_layer_types")
    if kinds is None:
        return read.integer("first_k_dense_replace", 0)
    num_dense = kinds[:num_layers].count("dense")
    if kinds[:num_layers] != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise CheckpointError(
            f"config.json: mlp_layer_types must list 'dense' for the first of {num_layers} layers "
            f"and 'sparse' for the others; found {kinds}."
        )
    return num_dense


def eos_ids(read: Reader) -> tuple[int, ...]:
    """`eos_token_id`, one or several."""
    eos = read.config.get("eos_token_id")
    if eos is None:
        return ()
    listed = eos if isinstance(eos, list) else [eos]
    vocab = read.integer("vocab_size")
    return tuple(token_id(found, vocab, "config.json: eos_token_id") for found in listed)


def token_id(found: Any, vocab: int, where: str) -> int:
    """`found`, if it is an id of a vocabulary of `vocab` tokens. Raises CheckpointError that begins
    with `where` it was found: steps index rows of logits by it."""
    if isinstance(found, bool) or not isinstance(found, int):
        raise CheckpointError(f"{where} must be a whole number, found {found!r}.")
    if not 0 <= found < vocab:
        raise CheckpointError(
            f"{where} is {found}, and the model's vocabulary of {vocab} tokens ends with "
            f"{vocab - 1}."
        )
    return found
