"""Makes torch compute without keeping more and more compiled code."""

import torch


def compile_nothing() -> None:
    """Turns oneDNN off, which compiles code for each new shape of a product and keeps it while the process lives.

    An expert meets a new shape whenever the router gives it a number of tokens that it has not had before. With torch
    2.13.0 (oneDNN 3.12.0) a training of the layout ep2 grew by 185 MB in 150 steps without any save. Rare numbers of
    tokens add 3.3 MB each in any later part of a life. That would be taken for a leak, or hide one.
    """
    torch.backends.mkldnn.enabled = False
