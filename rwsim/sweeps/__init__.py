"""Hyperparameter sweeps on simulated walks: `grid` says what, `run` walks it, `ledger` keeps it, `result` labels it."""
