"""What all routes share: admission, and what operators see of the requests that it admits."""

from quire.api.access.admission import Admission, AdmissionSettings
from quire.api.models.registry import Models
from quire.api.watch.activity import Activity
from quire.api.watch.watchers import Watchers
from quire.observe.metrics import Metrics


class ServerState(Admission):
    """Of one server. On one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: AdmissionSettings | None = None) -> None:
        super().__init__(models, metrics, settings)
        self.activity = Activity(self.open_requests)
        self.watchers = Watchers(self)
        self.observers.append(self.activity)
