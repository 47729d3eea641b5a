"""Imports mlx-lm without its side effect: on import, mlx-lm lowers the process's limits of open files, also the hard
limit, which an unprivileged process cannot raise again."""

import resource

_set_limit = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    from mlx_lm import utils
finally:
    resource.setrlimit = _set_limit

__all__ = ["utils"]
