"""Finds the tests of with_verl/ only where verl is: test_verl.py launches them there."""

import importlib.util

# Not verl itself: this folder has its name, and pytest puts the one above on the path.
collect_ignore = [] if importlib.util.find_spec("mbridge") else ["with_verl"]
