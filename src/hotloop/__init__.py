"""hotloop makes an existing PyTorch loop fast and correct with one line, without taking the loop away."""

__version__ = "0.1.0"
