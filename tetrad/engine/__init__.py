"""The step: schedule, run, apply, and the process around it."""
