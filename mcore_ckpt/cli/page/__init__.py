"""The page of `mcore-ckpt inspect --html`: its template, and the module that fills it in."""
