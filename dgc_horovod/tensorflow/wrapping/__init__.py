"""Settings and variables of an optimizer or tape, and the ownership of their state."""
