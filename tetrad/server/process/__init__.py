"""The server's processes: the first one, those beside it, and the annex."""
