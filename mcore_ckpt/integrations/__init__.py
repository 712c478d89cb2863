"""What each framework needs to use this package, in its own words. None of them is imported before it is asked for."""
