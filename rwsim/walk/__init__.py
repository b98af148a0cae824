"""The simulator: the toy system, the engines that walk it, and what they measure."""
