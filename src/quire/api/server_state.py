"""The state that all routes share: admission, request metrics, and the subscribers of the operator's event stream."""

from quire.api.access.admission import Admission, AdmissionSettings
from quire.api.models.registry import Models
from quire.api.watch.activity import Activity
from quire.api.watch.watchers import Watchers
from quire.observe.metrics import Metrics


class ServerState(Admission):
    """The state of one server. Used from one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: AdmissionSettings | None = None) -> None:
        super().__init__(models, metrics, settings)
        self.activity = Activity(self.open_requests)
        self.watchers = Watchers(self, self.activity)
        self.observers.append(self.activity.record_ended)
