"""A committed checkpoint, rewritten for another layout: without GPUs, without the model, in bounded memory."""
