"""Lockstep's engine as a backend of torch.distributed, for processes on one host or several.

    import lockstep
    torch.distributed.init_process_group("lockstep")

`import lockstep` registers the backend "lockstep"; everything of torch.distributed that runs on Gloo runs on it: CPU tensors
where they lie, CUDA tensors by way of the host's memory.
replace_gloo(), the variable LOCKSTEP_REPLACE_GLOO=1 and `python -m lockstep SCRIPT` put it where programs ask for "gloo".
"""

from lockstep._build import VERSION as __version__
from lockstep import _requirements

_requirements.check_torch()

# The order matters: _C links to torch's libraries, which `import torch` loads.
from lockstep._backend import DistTimeoutError, ProcessGroupLockstep  # noqa: E402
from lockstep._between_hosts import BetweenHostsState, ErrorFeedback, between_hosts, between_hosts_hook  # noqa: E402
from lockstep._gloo import gloo_is_replaced, replace_gloo  # noqa: E402

__all__ = [
    "BetweenHostsState", "DistTimeoutError", "ErrorFeedback", "ProcessGroupLockstep", "__version__", "between_hosts",
    "between_hosts_hook", "gloo_is_replaced", "replace_gloo",
]  # fmt: skip
