"""How many processors this process may use, for the API processes."""

from tetrad.kernels.host import usable_processors

__all__ = ["usable_processors"]
