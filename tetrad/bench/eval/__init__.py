"""Exact match on held-out problems of Abacus."""
