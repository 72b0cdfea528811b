"""hotloop makes an existing PyTorch loop fast and correct with one line, without taking the loop away."""

from hotloop._metrics import Metrics
from hotloop._optimize import optimize
from hotloop._plan import Plan

__all__ = ["Metrics", "Plan", "optimize"]
__version__ = "0.1.0"
