"""Inputs of the router's product, and the answer in float64."""

from __future__ import annotations

from tetrad.kernels.backend import Check
from tetrad.kernels.linear import check as linear

CHECK = Check(linear.inputs, linear.expected)
