"""miles' functions and methods, with the signatures in facts/miles.json. It is a fork: see the stand-in for slime."""
