"""This process's share of the machine's processors, for the API processes."""

from tetrad.kernels.host import usable_processors

__all__ = ["usable_processors"]
