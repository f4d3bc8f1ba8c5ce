"""With a real Ray on this machine; nothing here is imported by a Ray worker but :mod:`tests.ray.actors`."""
