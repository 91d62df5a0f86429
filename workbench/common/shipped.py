"""Files that come with the package: beside it in a checkout, inside it in a wheel."""

from pathlib import Path

from workbench.common.errors import WorkbenchError

PACKAGE = Path(__file__).resolve().parents[1]
# a folder of the checkout, and what a wheel calls it (pyproject.toml: force-include)
IN_WHEEL = {
    "kernels": "_kernels",
    "notebooks": "_notebooks",
    "data/prompts": "_prompts",
    "data/results": "_results",
}


def shipped(folder: str, *names: str) -> Path:
    """The folder that has these files: in the checkout, or else in the wheel.

    folder: a key of IN_WHEEL.

    Raises WorkbenchError where neither has all files.
    """
    for found in (PACKAGE.parent / folder, PACKAGE / IN_WHEEL[folder]):
        if all((found / name).is_file() for name in names):
            return found
    raise WorkbenchError(
        f"cannot find {', '.join(names)} of {folder} beside {PACKAGE}; install token-workbench "
        "again, or restore them from the repository"
    )
