"""One rank's step, timed."""
