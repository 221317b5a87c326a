"""What a step costs with each exchange, and which of them a job takes."""
