"""Pure sympy in, sympy out, and its numeric evaluation in numpy. Imports neither torch nor the simulator."""
