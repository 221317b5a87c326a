"""The owner of a step: one `Session` for each optimizer, with a carrier of bytes and a strategy."""
