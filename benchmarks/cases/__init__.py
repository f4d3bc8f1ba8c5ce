"""What is measured: one module for each subcommand of ``aiosync bench``."""
