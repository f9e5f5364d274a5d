"""The engine: schedule, run, apply, and the process around it."""
