"""Makes this folder's modules, and the programs as modules, importable by its tests."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]
