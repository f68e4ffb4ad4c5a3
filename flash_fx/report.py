"""What was found, fused and left, for people, snapshots and tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class SiteReport:
    """One attention. `status` is "fused" or "left"; `reason` a stable code, None when fused; `location` is file:line.

    `shapes` holds query, key and value as [batch, heads, length, head_dim] (or the softmax's shape when left).
    """

    status: str
    reason: str | None
    message: str
    program: str
    location: str
    shapes: tuple[str, ...]
    dtype: str

    def __str__(self) -> str:
        place = self.location.replace("\\", "/").rsplit("/", 1)[-1]
        lines = [f"{self.status} {place} {self.dtype} {' '.join(self.shapes)}"]
        if self.status == "fused":
            lines.append(f"  program: {self.program or '(plain softmax)'}")
        else:
            lines.append(f"  {self.reason}: {self.message}")
        return "\n".join(lines)


@dataclass
class Report:
    """All sites of one captured function. `str()` is stable ASCII, fit for a snapshot; `to_json()` holds the same."""

    sites: list[SiteReport] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(s.status == "fused" for s in self.sites)

    @property
    def left(self) -> int:
        return sum(s.status == "left" for s in self.sites)

    def __str__(self) -> str:
        head = f"{self.fused} fused, {self.left} left"
        text = "\n".join([head, *(str(s) for s in self.sites)])
        return text.encode("ascii", "backslashreplace").decode()

    def to_json(self) -> str:
        return json.dumps({"fused": self.fused, "left": self.left, "sites": [asdict(s) for s in self.sites]}, indent=2)

    def extend(self, other: Report) -> None:
        self.sites.extend(other.sites)


_RECORDINGS: ContextVar[tuple[list[Report], ...]] = ContextVar("flash_fx_recordings", default=())


@contextlib.contextmanager
def recording() -> Iterator[list[Report]]:
    """Collect one report for every graph compiled inside the block, also where compiled code comes from a warm cache.

    with flash_fx.recording() as reports:
        torch.compile(model, backend=flash_fx)(x)
    assert sum(r.fused for r in reports) == 12
    """
    reports: list[Report] = []
    token = _RECORDINGS.set((*_RECORDINGS.get(), reports))
    try:
        yield reports
    finally:
        _RECORDINGS.reset(token)


def publish(report: Report) -> None:
    """Hand a report to every open recording."""
    for reports in _RECORDINGS.get():
        reports.append(report)
