"""Runs lives.py. Megatron's torch_dist spawns processes, which import this module again, but not what it runs."""

if __name__ == "__main__":
    from tests.skyrl import lives

    lives.main()
