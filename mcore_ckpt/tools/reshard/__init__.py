"""Rewrites a committed checkpoint for another layout, without GPUs, without the model and in bounded memory."""
