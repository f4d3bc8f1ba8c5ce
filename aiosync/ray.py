"""For Ray actors: ``from aiosync.ray import WeightActorMixin``."""

from aiosync.schemes.ray_actor import WeightActorMixin

__all__ = ["WeightActorMixin"]
