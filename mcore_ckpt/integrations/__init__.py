"""Adapters for training frameworks: each offers the classes or functions that its framework expects.

A framework is imported only when its adapter is. Of this package, an adapter uses only doors and the public names of
rooms.
"""
