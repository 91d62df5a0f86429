"""The flags of commands that repeat a test until its result is precise enough, or resume a run."""

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from workbench.cli import flags as f
from workbench.common.errors import UsageError


@dataclass(frozen=True)
class Repeat:
    """`--until` and `--at-most`, as they were typed."""

    until: Annotated[
        str | None, f.flag("repeat until the 95 % interval's half-width is that small, as 1%")
    ] = None
    at_most: Annotated[
        str | None, f.flag("with --until: end after so much measuring, as 30s or 1h; default 10m")
    ] = None

    def arguments(self, n: int = 1) -> dict[str, Any]:
        """The keyword arguments of `ab` and `bench`; n calls share the time. Raises UsageError for
        a text that is no share or no length of time, and for a time without a share."""
        from workbench.benchmarks.compare import until

        if self.until is None:
            if self.at_most is not None:
                raise UsageError("--at-most ends what --until repeats; add --until 1%, say")
            return {}
        share, at_most_s = until.parse_share("--until", self.until), until.AT_MOST_S
        if self.at_most is not None:
            at_most_s = until.parse_duration("--at-most", self.at_most)
        return {"until": share, "at_most_s": at_most_s / n}


Resume = Annotated[bool, f.flag("continue the run in --out; with --until for --at-most again")]
RepeatFlags = Annotated[Repeat, Parameter(name="*")]
DEFAULT_REPEAT = Repeat()
