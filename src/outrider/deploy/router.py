"""Ray Serve's door to `prefix.Places`: its router asks here which replica should get a request."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from outrider.deploy.prefix import Places
from outrider.deploy.relay import Ask, Pin


class PrefixRouter(RequestRouter):
    """Ranks replicas by what they have read of a request's beginning, and by their load."""

    def initialize_state(self, **_: Any) -> None:
        """Called once by Ray Serve, before anything is routed."""
        self.places = Places()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ray Serve takes the first one that has room."""
        asked = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Ray asks again at once, for ever
            asked = pending_request.args[0] if pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(asked, Pin):
            return [[by_name[asked.server]]] if asked.server in by_name else []
        digests, avoid = (asked.digests, asked.avoid) if isinstance(asked, Ask) else ((), ())
        return [[by_name[name]] for name in self.places.rank(digests, by_name, avoid)]

    def on_send_request(self, replica_id: Any) -> None:
        """A request is on its way; it counts at once, or all that come together would go to one replica."""
        super().on_send_request(replica_id)
        self.places.began(replica_id.unique_id)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica has taken a request."""
        if pending_request.args and isinstance(pending_request.args[0], Ask):
            self.places.read(pending_request.args[0].digests, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Called once for each that was sent, however it ended."""
        self.places.ended(replica_id.unique_id)
