"""hotloop makes an existing PyTorch loop fast and correct with one line, without taking the loop away."""

from hotloop._compare import compare
from hotloop._data_loader import data_loader
from hotloop._evaluate import fast_eval
from hotloop._loading import prefetch
from hotloop._metrics import Metrics
from hotloop._optimize import optimize
from hotloop._plan import Plan
from hotloop._syncs import find_syncs

__all__ = ["Metrics", "Plan", "compare", "data_loader", "fast_eval", "find_syncs", "optimize", "prefetch"]
__version__ = "0.1.0"
