"""`python -m rwsim.cli`."""

from rwsim.cli import main

main()
