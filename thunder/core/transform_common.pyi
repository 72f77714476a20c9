"""Made by tests/stubs.py."""

from thunder.transforms.base import Transform as Transform
from thunder.transforms.cse import cse as cse
from thunder.transforms.dce import dce as dce
