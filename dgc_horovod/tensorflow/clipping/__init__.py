"""A script's clipping, by optimizer or tape, and the local clipping that it becomes."""
