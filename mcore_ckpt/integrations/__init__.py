"""Integrations for training frameworks: each offers the classes or functions that its framework expects.

A framework is imported only when its integration is imported. An integration uses only the doors and the public names
of rooms.
"""
