"""``python -m aiosync``: the command line."""

from aiosync.cli import main

if __name__ == "__main__":
    main()
