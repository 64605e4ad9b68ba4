"""The arithmetic of a decoder: one file per operation, usable on its own.

Each file states its operation in plain PyTorch.  That statement is the specification, for values and for gradients;
whatever is faster is held to it.
"""
