"""aiosync measured beside other software and the machine's limit. ``aiosync bench`` lists the cases."""
