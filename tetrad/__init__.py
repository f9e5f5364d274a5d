"""Tetrad serves NVFP4 mixture-of-experts language models of the GLM-5 class."""

__version__ = "0.1.0"
