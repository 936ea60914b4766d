"""The series that a replica exports."""

from __future__ import annotations

import time

from stitch.replica.gate import Gate
from stitch.replica.metrics import Counter, Gauge, Histogram, Registry, StateGauge
from stitch.replica.state import ReplicaStatus
from stitch.types import ReplicaState

PAUSE_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


class ReplicaMetrics:
    """Counters that the proxy and the reconciler feed, and gauges read from the status."""

    def __init__(self, status: ReplicaStatus, gate: Gate) -> None:
        self.requests = Counter(
            "stitch_requests_total", "Requests by what became of them.", ("outcome",)
        )
        self.request_s = Histogram(
            "stitch_request_seconds", "Time from a request's arrival to its answer's end."
        )
        self.in_flight = 0
        self.commits = Counter("stitch_commits_total", "Commits by outcome.", ("outcome",))
        self.bytes_fetched = Counter("stitch_fetched_bytes_total", "Bytes read from the board.")
        self.pause_ms = Histogram(
            "stitch_commit_pause_ms", "Time without a decoding step per commit.", PAUSE_MS_BUCKETS
        )
        self.publish_to_served_s = Histogram(
            "stitch_publish_to_served_seconds", "From a version's publication to its first use."
        )
        self.polls = Counter("stitch_polls_total", "Looks at the board by outcome.", ("outcome",))
        self.proven_tensors = Counter(
            "stitch_proven_tensors_total", "Live tensors proven in the background."
        )
        self.proof_rounds = Counter(
            "stitch_proof_rounds_total", "Times that all live tensors were proven so."
        )
        started_s = time.time()
        self._registry = Registry()
        self._registry.add(
            Gauge("stitch_ready", "1 when it should get traffic.", lambda: int(status.ready)),
            Gauge("stitch_applied_version", "Version that is served.", lambda: status.applied),
            Gauge("stitch_newest_version", "Newest version seen.", lambda: status.newest),
            Gauge("stitch_lag_versions", "Versions behind the newest.", lambda: status.lag),
            StateGauge(
                "stitch_state",
                "State of the replica.",
                "state",
                [state.value for state in ReplicaState],
                lambda: status.state.value,
            ),
            Gauge("stitch_requests_in_flight", "Requests in the engine.", lambda: self.in_flight),
            Gauge("stitch_requests_waiting", "Held by a commit.", lambda: gate.num_waiting),
            Gauge("stitch_start_time_seconds", "Unix time of the start.", lambda: started_s),
            self.requests,
            self.request_s,
            self.commits,
            self.pause_ms,
            self.bytes_fetched,
            self.publish_to_served_s,
            self.polls,
            self.proven_tensors,
            self.proof_rounds,
        )

    def text(self) -> str:
        return self._registry.text()
