"""Adapters to the contexts of other libraries. An adapter is imported only after its library has been
imported."""
