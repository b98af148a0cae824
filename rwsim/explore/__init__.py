"""`rwsim explore`: a page with sliders whose formulas are written by the theory, and the local server that simulates a point."""
