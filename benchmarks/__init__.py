"""How fast the engines walk, beside what a user would write today: `python -m benchmarks` from the checkout."""
