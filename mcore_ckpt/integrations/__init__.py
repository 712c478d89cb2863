"""Adapters for training frameworks: each offers the classes or functions that its framework expects.

No framework is imported until its adapter is imported. An adapter uses only doors and the public names of rooms.
"""
