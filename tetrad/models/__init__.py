"""One file per architecture, named after its model_type, and the loader that fills it."""
