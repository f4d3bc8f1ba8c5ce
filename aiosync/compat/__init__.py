"""What other libraries expect of a scheme. Nothing here is imported before they are."""
