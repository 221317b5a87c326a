"""Sessions of Keras optimizers: the owner of a step, with a strategy."""
