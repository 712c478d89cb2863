"""A stand-in for mamba_ssm, whose kernels need a GPU: the same computations, step by step in torch."""
