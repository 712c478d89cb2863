"""slime's functions and methods that the integration replaces or is called by, with the signatures in facts/slime.json.

Megatron-LM's functions, which slime imports, are the real ones.
"""
