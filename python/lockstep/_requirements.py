"""What must be there before the engine is loaded, each said in one line where it is not."""

from lockstep._build import TORCH_VERSION, VERSION

NEXT_TORCH = "{}.{}".format(*(int(part) + step for part, step in zip(TORCH_VERSION.split("."), (0, 1))))


def check_torch():
    """Raises ImportError unless torch is there, has torch.distributed, and is the minor version this was built for."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"lockstep {VERSION} needs torch {TORCH_VERSION}, and there is none: "
                          f"pip install 'torch>={TORCH_VERSION},<{NEXT_TORCH}'") from None
    if ".".join(torch.__version__.split(".")[:2]) != TORCH_VERSION:
        raise ImportError(f"lockstep {VERSION} was built for torch {TORCH_VERSION}; this is torch {torch.__version__}: "
                          f"pip install 'torch>={TORCH_VERSION},<{NEXT_TORCH}', or build Lockstep for this one with "
                          "pip install --force-reinstall --no-deps ./python in its repository")
    if not torch.distributed.is_available():
        raise ImportError(f"lockstep {VERSION} needs torch.distributed, which this torch {torch.__version__} was built "
                          "without: install torch from pypi.org or pytorch.org")
