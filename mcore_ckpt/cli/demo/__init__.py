"""`mcore-ckpt demo`: a training is killed and comes back as if nothing had happened."""
