"""Turns a trainer's objects (model, optimizer, random state, scheduler) into named shards, and back."""
