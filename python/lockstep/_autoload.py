"""What `import torch` runs of this package (entry point "torch.backends"): it lets a variable replace Gloo."""

import os

VARIABLE = "LOCKSTEP_REPLACE_GLOO"
_MEANINGS = {"": False, "0": False, "false": False, "no": False, "off": False,
             "1": True, "true": True, "yes": True, "on": True}


def autoload():
    """Replaces Gloo if LOCKSTEP_REPLACE_GLOO says so; imports nothing otherwise. ValueError for a value it doesn't know."""
    value = os.environ.get(VARIABLE, "")
    meaning = _MEANINGS.get(value.strip().lower())
    if meaning is None:
        raise ValueError(f"{VARIABLE} is '{value}'; it takes 1 (Lockstep's engine wherever a program asks for gloo) or 0")
    if meaning:
        # It may be `import lockstep` that imports torch: the package is incomplete then, so its parts are asked.
        from lockstep import _requirements

        _requirements.check_torch()
        from lockstep import _gloo

        _gloo.replace_gloo()
