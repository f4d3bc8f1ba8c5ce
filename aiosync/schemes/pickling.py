"""What a pickled scheme contains: an allow-list of its options, and how a worker finds the sender."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from aiosync.schemes.settings import SchemeSettings

__all__ = ["PickledScheme"]


class PickledScheme(SchemeSettings):
    """Pickles and copies a scheme. Models, contexts and live endpoints stay behind."""

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        """Return the fields to copy that this class adds, among them the sender's address.

        Args:
            inherit: whether the copy stays in this process or goes to a child that is being started, and so
                may have objects that can only be inherited.
        """
        return {}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        """Set the fields that :meth:`_recipe` returned."""
        return

    def __getstate__(self) -> dict[str, Any]:
        return self._state(inherit=get_spawning_popen() is not None)

    def _state(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "spec": self._spec,
            "model_id": self._model_id,
            "token": self._token,
            "strategy": self._strategy,
            "first_worker": self._first_worker,
            "recipe": self._recipe(inherit=inherit),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["spec"], state["model_id"], state["token"], state["strategy"])
        self._first_worker = state["first_worker"]
        self._restore(state["recipe"])

    def __copy__(self) -> Self:
        """Copy the recipe, for another endpoint in this process."""
        twin = type(self).__new__(type(self))
        twin.__setstate__(self._state(inherit=True))
        return twin
