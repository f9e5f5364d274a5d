"""What --quantization may ask for: linear weights quantised as they are loaded."""

from __future__ import annotations

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch
from tetrad.core.errors import ConfigError

SCHEMES = ("nvfp4", "fp8", "int8")


def checked_scheme(name: str) -> str:
    """One of `SCHEMES`. Raises ValueError for others: those that SGLang and vLLM have, such as
    modelopt_fp4, say how a checkpoint is stored."""
    if name not in SCHEMES:
        *most, last = SCHEMES
        raise ValueError(
            "the format of each tensor is read from the checkpoint; leave it out (a model without "
            f"experts can be quantised as it is loaded, to {', '.join(most)} or {last})."
        )
    return name


def check_scheme(scheme: str | None, arch: Arch, *, is_drawn: bool = False) -> None:
    """Raises ConfigError for a scheme with a model that has experts. `is_drawn`: its weights come
    from no checkpoint."""
    if scheme is None or not isinstance(arch, ModelArch):
        return
    if is_drawn:
        raise ConfigError(
            f"--quantization {scheme}: --load-format dummy draws the experts of {arch.model_type} "
            "in NVFP4 and all else not quantised; leave it out."
        )
    raise ConfigError(
        f"--quantization {scheme}: {arch.model_type} is served as it is stored; tetrad "
        "quantize makes an NVFP4 checkpoint of it."
    )
