"""What PyTorch and Triton want of a call: launches, and calls that repeat them."""
