"""The command that copies the notebooks: they come with the package, and run anywhere beside it."""

from pathlib import Path
from typing import Annotated

from cyclopts import App

from workbench.cli import flags as f
from workbench.cli.common import app, say
from workbench.common.errors import UsageError
from workbench.common.output import check_writable, write_text
from workbench.common.shipped import shipped

notebooks_app = App(name="notebooks", help="Copy the notebooks that come with the package.")
app.command(notebooks_app)

NOTEBOOKS = Path("notebooks")  # where `workbench report` looks for names
# a page that the notebooks link to in a checkout, and where its copy lies beside copied notebooks
LINKED, COPIED = "../data/results/README.md", "recorded_results.md"


def shipped_notebooks() -> list[str]:
    """The names of the notebooks that come with the package, in their order."""
    folder = shipped("notebooks", "00_tour.ipynb")
    return sorted(path.stem for path in folder.glob("*.ipynb"))


@notebooks_app.command
def copy(
    out: Annotated[Path, f.flag("folder to copy them to", "--out")],
    *,
    force: Annotated[bool, f.flag("replace notebooks that differ from these")] = False,
) -> None:
    """Copy the notebooks into a folder, with the page of recorded results that they link to."""
    texts = {
        path.name: path.read_text("utf-8").replace(LINKED, COPIED)
        for path in sorted(shipped("notebooks", "00_tour.ipynb").glob("*.ipynb"))
    }
    page = shipped("data/results", "README.md") / "README.md"
    texts[COPIED] = page.read_text("utf-8")
    for name, text in texts.items():
        path = out / name
        check_writable(path, parents=True)
        if not force and path.is_file() and path.read_text("utf-8") != text:
            raise UsageError(
                f"{path} is there and differs; name another folder, or replace it with --force"
            )
    for name, text in texts.items():
        write_text(out / name, text, parents=True)
    usual = out.resolve() == NOTEBOOKS.resolve()
    run = "workbench report" if usual else f"workbench report {out}/*.ipynb"
    say(f"{len(texts) - 1} notebooks in {out}; `{run}` runs them")
