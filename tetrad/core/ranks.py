"""One rank of a layout, as a value: how many ranks share what, and which of them this is.

Sharding as pipeline, tensor, expert and data parallelism do it. `pp` stages hold layers one after
the other, with `tp` ranks each. Among these `attn_dp` groups attend to sequences of their own; the
`attn_tp` ranks of a group split the heads and the columns of dense layers and of the shared expert.
`ep` deals out whole experts, and splits their columns as far as tp is larger. The output head's
rows lie over all `tp` ranks of the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tetrad.core.arch import ModelArch
from tetrad.core.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks share a layer, its experts and its sequences; `rank` is one of them."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    attn_dp: int = 1
    """Groups of ranks that attend to sequences of their own."""
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> Ranks:
        """From "tp=8,ep=8,attn_dp=8,rank=0"; what is left out stays as it is by default. Raises
        ValueError with a sentence."""
        names = [field.name for field in fields(cls)]
        found: dict[str, int] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, number = part.partition("=")
            if name not in names:
                known = ", ".join(names)
                raise ValueError(f"there is no {name!r}, only {known}.{nearest(name, names)}")
            if name in found:
                raise ValueError(f"{name} is named twice")
            least = 0 if name == "rank" else 1
            if not number.isdecimal() or int(number) < least:
                raise ValueError(f"{name} must be a whole number from {least} on")
            found[name] = int(number)
        if not found:
            raise ValueError("a layout was expected, such as tp=8,ep=8,attn_dp=8,rank=0")
        return cls(**found)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def size(self) -> int:
        """Ranks of the whole layout."""
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        """Which stage of the pipeline."""
        return self.rank // self.tp

    @property
    def is_first_stage(self) -> bool:
        """Does the rank see token ids?"""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Does the rank see logits?"""
        return self.stage == self.pp - 1

    def layers(self, num_layers: int) -> range:
        """Those of its stage."""
        return range(num_layers * self.stage // self.pp, num_layers * (self.stage + 1) // self.pp)

    @property
    def attn_tp(self) -> int:
        """Ranks that share a head's layer: one group of attention's data parallelism."""
        return self.tp // self.attn_dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return max(1, self.tp // self.ep)

    @property
    def attn_part(self) -> int:
        """Which part of the heads and of dense columns is this rank's."""
        return self.rank % self.tp % self.attn_tp

    @property
    def attn_group(self) -> int:
        """Which group's sequences are this rank's."""
        return self.rank % self.tp // self.attn_tp

    @property
    def expert_part(self) -> int:
        """Which part of its experts' columns is this rank's."""
        return self.rank % self.tp % self.expert_tp

    def held(self, num_experts: int) -> range:
        """The rank's experts."""
        local = num_experts // self.ep
        first = self.rank % self.tp // self.expert_tp * local
        return range(first, first + local)

    def arch_of(self, arch: ModelArch) -> ModelArch:
        """The rank's share of layers and widths. Experts and vocabulary keep their number, since
        routing and token ids are everybody's."""
        layers = self.layers(arch.num_layers)
        full = (layer for layer in arch.indexer.full_layers if layer in layers)
        moe = replace(
            arch.moe,
            first_dense_layers=max(0, arch.moe.first_dense_layers - layers.start),
            intermediate=arch.moe.intermediate // self.expert_tp,
            shared_intermediate=arch.moe.shared_intermediate // self.attn_tp,
        )
        mla = replace(arch.mla, num_heads=arch.mla.num_heads // self.attn_tp)
        return replace(
            arch,
            num_layers=len(layers),
            first_layer=arch.first_layer + layers.start,
            mla=mla,
            moe=moe,
            indexer=replace(
                arch.indexer, full_layers=tuple(layer - layers.start for layer in full)
            ),
            dense_intermediate=arch.dense_intermediate // self.attn_tp,
        )

    def check(self, arch: ModelArch, flag: str = "--ranks") -> None:
        """Raise ConfigError when they do not divide the model."""
        if self.tp > self.ep and self.tp % self.ep:
            raise ConfigError(f"{flag} tp={self.tp},ep={self.ep}: tp must be a multiple of ep.")
        for what, size, parts in (
            ("experts", arch.moe.num_experts, self.ep),
            ("attention heads", arch.mla.num_heads, self.attn_tp),
            ("columns of a dense layer", arch.dense_intermediate, self.attn_tp),
            ("columns of an expert", arch.moe.intermediate, self.expert_tp),
        ):
            if size % parts:
                raise ConfigError(f"{flag}: {size:,} {what} cannot be dealt to {parts} ranks.")

    def check_program(self, arch: ModelArch, flag: str) -> None:
        """Raise ConfigError where there is no program of one rank for this layout and model."""
        for name in ("ep", "attn_dp"):
            number = getattr(self, name)
            if self.tp % number:
                raise ConfigError(
                    f"{flag} tp={self.tp},{name}={number}: {name} deals out the ranks of tp, so "
                    f"tp must be a multiple of it; tp={number} works."
                )
        if self.rank >= self.size:
            raise ConfigError(
                f"{flag} rank={self.rank}: the layout has {self.size} ranks, counted from 0; "
                f"rank={self.size - 1} is the last."
            )
        self.check(arch, flag)
        if self.pp > arch.num_layers:
            raise ConfigError(
                f"{flag} pp={self.pp}: {arch.num_layers} layers do not fill {self.pp} stages."
            )
        first = self.layers(arch.num_layers).start
        if first not in arch.indexer.full_layers:
            raise ConfigError(
                f"{flag} pp={self.pp}: stage {self.stage} would begin with layer {first}, which "
                "reads the keys that a layer before it chose; another pp may cut elsewhere."
            )
        if arch.vocab % self.tp:
            raise ConfigError(
                f"{flag}: {arch.vocab:,} rows of the output head cannot be dealt to "
                f"{self.tp} ranks."
            )


ALONE = Ranks()
"""One rank that holds everything."""


def checked_layout(text: str) -> str:
    """A layout as `Ranks.parse` reads it, written out in full. Raises ValueError."""
    return str(Ranks.parse(text))
