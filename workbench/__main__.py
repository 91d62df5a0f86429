"""`python -m workbench`: the `workbench` command."""

from workbench.cli import main

main()
