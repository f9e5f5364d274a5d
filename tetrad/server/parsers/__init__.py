"""Reasoning and tool calls, told apart from the text of an answer."""
