"""HTTP in, tokens out: the API process. It never imports torch; the engine is another process."""
