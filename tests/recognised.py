"""Writes docs/recognised.md from the table of cases: `python tests/recognised.py`. A test compares the two."""

from __future__ import annotations

import inspect
import re
import textwrap
from itertools import groupby
from pathlib import Path

import zoo
from zoo import CASES, Case

PAGE = Path(__file__).parents[1] / "docs" / "recognised.md"
HEAD = """# What is recognised, and what is left alone

Written from `tests/zoo.py` by `python tests/recognised.py`. Every row is tested: verdict, program, results and all
gradients against float64, static and dynamic. B = {B}, H = {H}, M = {M}, N = {N}, D = {D}; `q`, `k`, `v` are [B, H, length, D]
where the code does not say otherwise. [Random programs](../tests/test_attention_programs.py) and
[model families](../tests/families.py) are tried beside them.
"""


def page() -> str:
    """The whole text of the page."""
    parts = [HEAD.format(**{n: getattr(zoo, n) for n in "BHMND"})]
    for title, cases in groupby(CASES, key=_section):
        parts.append(f"\n## {title}\n")
        parts += [_row(c) for c in cases]
    return "\n".join(parts)


def _row(case: Case) -> str:
    code = _code(case)
    fence = f"\n```python\n{code}```\n" if code else ""
    return f"\n**{case.name}** {_verdict(case)}\n{fence}"


def _verdict(case: Case) -> str:
    if case.verdict == "leave":
        return f"is left: `{case.reason}`" if case.sites else "is no attention and not mentioned"
    programs = dict.fromkeys(case.program or ())
    return "is fused: " + ", ".join(f"`{p}`" if p else "(plain softmax)" for p in programs)


def _code(case: Case) -> str:
    """The row's function or module without its decorator; nothing for rows made by a loop."""
    made = case.make
    fn = made if inspect.isclass(made) else made()
    if not (inspect.isfunction(fn) or inspect.isclass(fn)):
        return ""
    return re.sub(r"\A(@.*\n|[ )].*\n)+", "", textwrap.dedent(inspect.getsource(fn)))


def _section(case: Case) -> str:
    """The heading in zoo.py above the row; a row made by a loop belongs to the one before it."""
    code = case.make if inspect.isclass(case.make) else case.make()
    source = Path(zoo.__file__).read_text()
    name = f"class {code.__name__}" if inspect.isclass(code) else f"def {getattr(code, '__name__', case.name)}"
    before = source[: source.find(name + "(") if name + "(" in source else len(source)]
    titles = re.findall(r"^# \*\*\* (.*) \*\*\*$", before, flags=re.M)
    return titles[-1].capitalize() if titles else "Attention"


if __name__ == "__main__":
    PAGE.write_text(page())
