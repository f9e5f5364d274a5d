"""OpenAI's chat and completions, and the chat that other APIs are translated to."""
