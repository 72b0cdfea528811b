"""The wrapped loop against the plain loop: the same weights, to the last bit."""
