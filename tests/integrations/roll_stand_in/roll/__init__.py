"""As much of ROLL as touches checkpoints, to run without ray and GPUs: names, signatures, files and the order of calls
are ROLL's (test_roll_contract.py compares them with what was recorded of its sources), the rest is made up."""
