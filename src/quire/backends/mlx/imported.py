"""mlx-lm, imported without what that does to the process: it lowers the limit of open files, hard limit included, and
a process that may not raise it again keeps that for good."""

import resource

_set_limit = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    from mlx_lm import utils
finally:
    resource.setrlimit = _set_limit

__all__ = ["utils"]
