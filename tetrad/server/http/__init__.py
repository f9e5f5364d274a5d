"""Connections: how they come in, are read, and are handed over."""
