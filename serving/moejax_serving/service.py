"""What the HTTP application sees of the process: whether it can answer, and by which engine."""

from collections.abc import Sequence
from typing import Literal

from moejax.errors import MoejaxError
from moejax_serving.async_engine import AsyncEngine, ShuttingDownError
from moejax_serving.metrics import Metrics

State = Literal["loading", "ready", "draining", "dead"]


class NotReadyError(MoejaxError):
    """The model is still being loaded; a later try can succeed."""


class Service:
    """One model that is served, from before it is loaded until the server ends."""

    def __init__(self, metrics: Metrics, served_model_names: Sequence[str]) -> None:
        """
        Args:
            metrics: what /metrics shows.
            served_model_names: names that requests may use; the first is the one shown.
        """
        self.metrics = metrics
        self.served_model_names = tuple(served_model_names)
        self._engine: AsyncEngine | None = None
        self._is_draining = False

    @classmethod
    def of(cls, engine: AsyncEngine, served_model_names: Sequence[str]) -> "Service":
        """A service that is ready."""
        service = cls(Metrics(served_model_names[0]), served_model_names)
        service.set_ready(engine)
        return service

    @property
    def state(self) -> State:
        """loading, then ready; draining once it is to end; dead once the engine has failed."""
        if self._engine is not None and self._engine.has_failed:
            return "dead"
        if self._is_draining:
            return "draining"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> AsyncEngine:
        """The engine; it refuses requests itself when it cannot answer them.

        Raises:
            NotReadyError: the model is still being loaded.
            ShuttingDownError: the server ends before it was loaded.
        """
        if self._engine is not None:
            return self._engine
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down")
        raise NotReadyError("the model is still being loaded: try again later")

    def set_ready(self, engine: AsyncEngine) -> None:
        """Answers requests from now on."""
        if self._is_draining:
            engine.drain()
        self._engine = engine

    def drain(self) -> None:
        """Refuses new requests from now on; those that were admitted go on."""
        self._is_draining = True
        if self._engine is not None:
            self._engine.drain()
