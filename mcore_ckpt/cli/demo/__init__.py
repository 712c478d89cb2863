"""`mcore-ckpt demo`: kills a training and shows that it resumes with exactly the same losses."""
