"""What is shown of a run: text, files for other readers, plots, one page."""
