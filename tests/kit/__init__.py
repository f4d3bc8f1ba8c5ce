"""What the tests are built with: worker processes, faults, leak checks, one clock."""
