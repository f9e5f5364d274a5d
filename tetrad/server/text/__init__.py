"""Text and tokens: the tokenizer, the chat template, stop strings, log-probabilities."""
