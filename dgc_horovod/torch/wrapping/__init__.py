"""What is looked at when an optimizer is wrapped, and said of it."""
