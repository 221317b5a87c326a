"""What a rank keeps, written and read."""
