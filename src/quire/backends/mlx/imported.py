"""Imports mlx-lm without its side effect: it lowers the process's open-file limits, hard limit included, and an
unprivileged process can never raise a hard limit again."""

import resource

_set_limit = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    from mlx_lm import utils
finally:
    resource.setrlimit = _set_limit

__all__ = ["utils"]
