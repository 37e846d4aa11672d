"""What `import torch` runs of Lockstep (entry point "torch.backends"): it lets a variable replace Gloo.

It stands outside the package, for importing lockstep registers the backend and needs the right torch; programs
that never ask for Lockstep must neither pay for that nor fail because of it.
"""

import os


def autoload():
    """Replaces Gloo if LOCKSTEP_REPLACE_GLOO says so; imports nothing if it is not set, or 0."""
    if os.environ.get("LOCKSTEP_REPLACE_GLOO", "") not in ("", "0"):
        from lockstep import _autoload

        _autoload.autoload()
