"""Settings: frozen, checked once, then passed on as values. Only this package reads flags, environment and TOML.

    table.py       all settings, each once       kinds.py    types of values
    sources.py     flag > environment > file     files.py    finds and reads the TOML file
    model_settings.py, scheduling.py, server_settings.py, parked_models.py    the dataclasses that other packages get

May import errors and the standard library. The other packages read no flags, environment or TOML themselves.
"""

from quire.config.model_settings import MEMORY_SHARE, Backend, Dtype, ModelSettings
from quire.config.parked_models import OnDemandModel
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import ServerSettings
from quire.config.sources import Resolved, Settings, check_variable, load_settings
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
    "check_variable",
    "load_settings",
]
