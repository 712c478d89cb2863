"""Finds the tests of with_verl/ only where verl is: test_verl.py launches them there."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["with_verl/*"]
