"""The measuring side: it speaks to a server as a stranger would, and never imports the engine."""
