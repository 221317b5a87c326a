"""What an optimizer or tape is made for: settings, variables, and whose state they have."""
