"""Ray Serve's door to `prefix.Places`: its router asks here which replica should get a request."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from outrider.deploy.prefix import Places
from outrider.deploy.relay import Ask


class PrefixRouter(RequestRouter):
    """Ranks replicas by what they have read of a request's beginning, and by their load."""

    def initialize_state(self, **_: Any) -> None:
        """Called once by Ray Serve, before anything is routed."""
        self.places = Places()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ray Serve takes the first one that has room."""
        ask = _ask(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self.places.rank(ask.digests if ask else (), by_name, ask.avoid if ask else ())
        return [[by_name[name]] for name in ranked]

    def on_send_request(self, replica_id: Any) -> None:
        """A request is on its way; it counts at once, or all that come together would go to one replica."""
        super().on_send_request(replica_id)
        self.places.began(replica_id.unique_id)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica has taken a request."""
        ask = _ask(pending_request)
        if ask is not None:
            self.places.read(ask.digests, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Called once for each that was sent, however it ended."""
        self.places.ended(replica_id.unique_id)


def _ask(pending: Any) -> Ask | None:
    """The request itself; None of anything else that is routed."""
    arguments = pending.args if pending is not None else ()
    return arguments[0] if arguments and isinstance(arguments[0], Ask) else None
