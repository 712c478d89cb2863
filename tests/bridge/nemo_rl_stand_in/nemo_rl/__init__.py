"""NeMo-RL's classes that the integration derives from or is called by, with the signatures in facts/nemo_rl.json.

What they call of Megatron-Bridge is the real one.
"""
