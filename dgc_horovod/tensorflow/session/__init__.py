"""The owner of a step: one `Session` for each Keras optimizer, with a strategy."""
