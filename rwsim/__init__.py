"""rwsim: a random-walk laboratory for optimizers with weight decay."""

__version__ = "0.1.0"
