"""The owner of an optimizer's steps, as far as no framework's tensors are needed; adapters build on it."""
