"""Modules that are installed on demand, and the extra of the distribution that brings each."""

from workbench.common.shipped import PACKAGE

# the modules that the package imports where they are needed, and the extra that brings each
EXTRAS = {
    "lab": ("ipykernel", "IPython", "ipywidgets", "nbconvert", "nbformat", "papermill"),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
    "gpu": ("cupy", "pynvml"),
    "cupti": ("cupti",),
    "distributed": ("distributed",),
}  # fmt: skip
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def install(extra: str) -> str:
    """The command that installs an extra: in a checkout, or beside a wheel."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'token-workbench[{extra}]'"


def refusal_of(error: ModuleNotFoundError) -> str:
    """One line on a module that is not installed; empty where no extra brings it."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return ""
    return f"this needs {module}, which is not installed; {install(EXTRA_OF[module])}"
