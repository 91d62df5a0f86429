"""The table of gaps between tokens beside large bodies (`tests/serve/stalls.py` records them)."""

from __future__ import annotations

from collections.abc import Iterator

from data.measure.recorded import Recorded, commit_of
from data.measure.tables import Line, Part, Table

NAME = "stalls"
CELLS = {
    "served": "{load}", "body": "{body}", "its request takes s": "{seconds:.2f}",
    "gaps": "{n}", "median ms": "{median:.2f}", "P99 ms": "{p99:.2f}",
    "P99 over alone": "{ratio:.2f}", "longest ms": "{most:.1f}",
}  # fmt: skip


def every(recorded: Recorded) -> Iterator[Line]:
    for load, found in (recorded.alone(NAME) or {}).items():
        alone = found["rows"]["alone"]
        for body, row in found["rows"].items():
            beside = body != "alone"
            yield Line({
                **row, "load": load, "body": body if beside else "none",
                "ratio": row["p99"] / alone["p99"] if beside else None,
                "seconds": row["seconds"] if beside else None,
            })  # fmt: skip


def where(recorded: Recorded) -> str:
    said = []
    for load, found in (recorded.alone(NAME) or {}).items():
        mib = found["body_bytes"] / 2**20
        gpus = [gpu["name"] for gpu in found["machine"]["gpus"]]
        on = ", ".join([f"{found['cores']} cores of {found['machine']['cpu']['name']}", *gpus])
        said.append(
            f"{load}: {found['streams']} streams, bodies of {mib:.0f} MiB, {found['rounds']} "
            f"rounds; {on}; commit {commit_of(found)}; {found['started'][:10]}."
        )
    return " ".join(said)


BLOCKS: dict[str, list[Part]] = {
    NAME: [Table("Gaps between tokens beside large bodies", every, CELLS, said=where)],
}
