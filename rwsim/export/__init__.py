"""Standalone rotational optimizers, written only after the harness has verified what they carry."""
