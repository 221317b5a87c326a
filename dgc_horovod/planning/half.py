"""When gradients can travel as half precision, which nobody has asked for."""

LARGEST = 65504 / 8  # of fp16, with room for steps whose gradients are larger
LOST = 0.01  # of a tensor's L2 norm at most
