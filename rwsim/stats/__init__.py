"""Error bars and verdicts: autocorrelation time, Monte Carlo standard error, equivalence."""
