"""From prompts to engine requests, and from what comes back to the bytes of an answer."""
