"""Public bug reports against attention fusion in other projects: each becomes a test or is shown not to apply."""

from __future__ import annotations

import field_programs
import field_programs_rest
import pytest
from field import PROGRAMS, Program, check

assert field_programs and field_programs_rest  # they fill PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_program(program: Program) -> None:
    check(program)
