"""What is told of the work that is done: figures, log lines, traces."""
