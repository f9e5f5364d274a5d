"""Building blocks of the models: each holds its weights and calls ops."""
