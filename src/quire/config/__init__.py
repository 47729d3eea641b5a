"""Settings: frozen, checked once, then handed down as values. The only reader of flags, environment and TOML.

    table.py       every setting, once           kinds.py    types of values
    sources.py     flag > environment > file     files.py    which file is read
    model_settings.py, scheduling.py, server_settings.py, parked_models.py    the dataclasses handed down
    settings_reference.py                        the page in docs/reference

May import errors and the standard library. Nothing below reads flags or the environment.
"""

from quire.config.model_settings import MEMORY_SHARE, Backend, Dtype, ModelSettings
from quire.config.parked_models import OnDemandModel
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import ServerSettings
from quire.config.sources import Resolved, Settings, load_settings
from quire.config.table import RENAMED, SETTINGS, Group, Setting

__all__ = [
    "MEMORY_SHARE",
    "RENAMED",
    "SETTINGS",
    "Backend",
    "Dtype",
    "Group",
    "ModelSettings",
    "OnDemandModel",
    "Resolved",
    "ServerSettings",
    "ServingSettings",
    "Setting",
    "Settings",
    "load_settings",
]
