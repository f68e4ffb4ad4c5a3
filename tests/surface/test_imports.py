"""Importing flash_fx is light: Triton and Jinja come in when a kernel is rendered, Rich with the demo."""

import subprocess
import sys

import pytest

LAZY = ("triton", "jinja2", "rich", "transformers", "expecttest")
# torch brings some of these itself on some installs, so only what flash_fx adds counts
CODE = """
import sys, torch, torch._dynamo, torch._inductor.custom_graph_pass
{before}
for name in {lazy!r}:
    sys.modules.pop(name, None)
import {module}
print([n for n in {lazy!r} if n in sys.modules])
"""


def imported(module: str, lazy: tuple[str, ...] = LAZY, before: str = "") -> str:
    code = CODE.format(module=module, lazy=lazy, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["flash_fx", "flash_fx.cli", "flash_fx.target"])
def test_import_is_light(module):
    assert imported(module, ("triton", "jinja2", "rich", "transformers")) == "[]"


def test_the_check_can_fail():
    assert imported("flash_fx.demo", ("rich",)) == "['rich']"
    assert imported("flash_fx.kernels.render", ("jinja2",)) == "['jinja2']"


def test_public_names():
    import flash_fx

    for name in flash_fx.__all__:
        assert getattr(flash_fx, name) is not None
    assert callable(flash_fx)
